# SPDX-License-Identifier: Apache-2.0
"""Plug-ins that run torch_npu without an NPU, in every process with this folder and `entry` in front of its PYTHONPATH.

torch loads `take_over` (entry point `torch.backends`), vLLM loads `in_vllm` (`vllm.general_plugins`). The code of
torch_npu, vLLM and vllm-ascend is unchanged; the libraries that they load are those of host_build.py.
"""

from __future__ import annotations

import importlib.metadata
import os

# torch_npu's own kernels for memory, sizes, views and streams work with the stand-ins as they are.
KEPT = {
    "aten::_copy_from",
    "aten::_copy_from_and_resize",
    "aten::_pin_memory",
    "aten::_to_copy",
    "aten::as_strided_",
    "aten::empty.memory_format",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::is_pinned",
    "aten::is_set_to",
    "aten::new_empty_strided",
    "aten::record_stream",
    "aten::resize_",
    "aten::resize_as_",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
    # torch_npu's own records
    "npu::get_npu_format",
    "npu::get_storage_size",
    "npu::npu_change_data_ptr",
    "npu::set_op_timeout_ms",
}
CANN = "9.1.0"  # of vllm-ascend's images
NAMESPACES = ("aten", "npu", "atb")  # of operators that are taken over


def take_over() -> None:
    """Run every operator that torch_npu has for the NPU on the host from now on."""
    import torch
    import torch_npu  # noqa: F401
    from torch_npu.op_plugin.atb._atb_ops import _register_atb_extensions

    from ascend_host import compressed, delta, hyper, library, moe, reference, sparse

    torch.version.cann = CANN  # torch_npu looks for it in the toolkit's folder, which is missing here
    _register_atb_extensions()
    of_kinds = (moe, delta, sparse, compressed, hyper, library)
    declared = {name: schema for kind in of_kinds for name, schema in kind.SCHEMAS.items()}
    reference.declare(declared)
    torch.ops.load_library(os.environ["ASCEND_HOST_OPERATORS"])
    for name, overload, is_view in torch.ops.ascend_host.operators():
        full = f"{name}.{overload}" if overload else name
        if name.split("::")[0] in NAMESPACES and not is_view and full not in KEPT:
            torch.ops.ascend_host.take(name, overload)
    for name in declared:
        torch.ops.ascend_host.take(name, "")
    reference.register()


def in_vllm() -> None:
    """Replace kernels that need Triton. Install a TCP transport, planted faults and notes, if a test asks for it."""
    from ascend_host import delta, faults, kernels, library, notes, repairs, wire

    release = ".".join(importlib.metadata.version("vllm_ascend").split(".")[:2])
    if release != "0.23":
        library.install()
    of_one = (kernels.IN_PLACE_OF_ONE[release], delta.IN_PLACE_OF_ONE[release])
    kernels.replace_functions(kernels.together(kernels.IN_PLACE_OF, delta.IN_PLACE_OF, *of_one))
    wire.install()
    repairs.install(release)
    faults.install()
    notes.install()
