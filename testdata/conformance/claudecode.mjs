// Claude Code logs in on a terminal, as a person has it do: node claudecode.mjs URL FLEETD DATA-DIR CLAUDE HOME document|registration
import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { mkdirSync } from "node:fs";
import { consent, validGrants } from "./login.mjs";

const [url, , , claude, home, way] = process.argv.slice(2);
const project = home + "/project";
mkdirSync(project, { recursive: true });
// Nothing of the person who runs the test: neither an account nor settings.
const options = { cwd: project, env: { HOME: home, PATH: process.env.PATH, TERM: "xterm", DISABLE_TELEMETRY: "1", DISABLE_AUTOUPDATER: "1", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1" } };
const run = (...args) => execFileSync(claude, args, { ...options, encoding: "utf8", timeout: 60_000 });

run("mcp", "add", "--transport", "http", "fleet", url);
const login = spawn("script", ["-qec", `${claude} mcp login --no-browser fleet`, "/dev/null"], options);
let shown = "";
const ended = new Promise((resolve) => login.on("exit", resolve));
const address = await new Promise((resolve, reject) => {
  const late = setTimeout(() => reject(new Error("no address to log in:\n" + shown)), 30_000);
  login.stdout.on("data", (data) => {
    shown += data;
    const found = shown.match(/https?:\/\/[^\s\x07\x1b]+\/oauth\/authorize\?[^\s\x07\x1b]+(?=[\x07\x1b])/);
    if (found) { clearTimeout(late); resolve(found[0]); }
  });
});
const asked = new URL(address).searchParams;
assert.equal(asked.get("resource"), url);
assert.equal(asked.get("client_id").startsWith("https://claude.ai/"), way === "document", asked.get("client_id"));
assert.ok(!asked.get("scope").includes("jobs"), "it asks for what it needs first: " + asked.get("scope"));
const to = await consent(address, way === "document" ? /Allow <strong>claude\.ai<\/strong> to use/ : /Allow <strong>localhost<\/strong> <em>\(unverified\)/);
assert.match(to.hostname, /^(localhost|127\.0\.0\.1)$/);
await fetch(to); // the browser goes to Claude Code
assert.equal(await ended, 0, shown);
const [grant, ...more] = validGrants(way === "document" ? "Claude Code" : "Claude Code (fleet)");
assert.ok(grant && more.length === 0, run("mcp", "list"));
assert.match(run("mcp", "list"), /fleet: .*Connected/);
run("mcp", "logout", "fleet");
console.log(`${run("--version").trim()}: logged in by ${way}, with ${grant.scopes.join(" ")}; after its logout the grant is ${validGrants(grant.grant.name).length ? "valid" : "ended"}`);
