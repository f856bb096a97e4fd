# SPDX-License-Identifier: Apache-2.0
"""The examples' manifests, and what is wrong with one by the schema of its kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from referencing import Registry
from referencing.jsonschema import DRAFT202012

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
SCHEMAS = {path.name: json.loads(path.read_text()) for path in (EXAMPLES / "schemas").glob("*.json")}
KUBERNETES = {
    ("v1", "ConfigMap"): "core.v1.ConfigMap",
    ("v1", "Service"): "core.v1.Service",
    ("v1", "ServiceAccount"): "core.v1.ServiceAccount",
    ("apps/v1", "StatefulSet"): "apps.v1.StatefulSet",
    ("discovery.k8s.io/v1", "EndpointSlice"): "discovery.v1.EndpointSlice",
    ("networking.k8s.io/v1", "NetworkPolicy"): "networking.v1.NetworkPolicy",
    ("policy/v1", "PodDisruptionBudget"): "policy.v1.PodDisruptionBudget",
    ("rbac.authorization.k8s.io/v1", "Role"): "rbac.v1.Role",
    ("rbac.authorization.k8s.io/v1", "RoleBinding"): "rbac.v1.RoleBinding",
}


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def containers_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document.get("spec", {})
    pod = spec.get("template") or spec.get("leaderWorkerTemplate", {}).get("workerTemplate")
    return pod["spec"]["containers"] if pod else []


def container_of(document: dict[str, Any]) -> dict[str, Any]:
    (container,) = containers_of(document)
    return container


def wrong(document: dict[str, Any], where: str) -> list[str]:
    """Errors of the document by the schema of its kind."""
    name = f"{document.get('kind', '').lower()}.json"
    if where == "compose":
        schema: dict[str, Any] = {"$ref": "compose.json"}
    elif name in SCHEMAS:
        schema = {"$ref": name}
    else:
        schema = {"$ref": "kubernetes.json#/$defs/io.k8s.api." + KUBERNETES[document["apiVersion"], document["kind"]]}
    registry: Registry[Any] = Registry().with_resources(
        (name, DRAFT202012.create_resource(contents)) for name, contents in SCHEMAS.items()
    )
    validator = jsonschema.Draft202012Validator(schema, registry=registry)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]
