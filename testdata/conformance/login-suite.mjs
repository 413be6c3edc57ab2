// The scenarios of the official conformance suite for authorization servers: node login-suite.mjs URL FLEETD DATA_DIR. They ask a
// person to open an address in a browser, whose part is played here.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { consent } from "./login.mjs";

const [url] = process.argv.slice(2);
const issuer = new URL(url).origin;
const redirect = "http://127.0.0.1:3000/callback"; // the suite's own
const registered = await fetch(issuer + "/oauth/register", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ client_name: "suite", redirect_uris: [redirect] }) });
const { client_id: id } = await registered.json();
const suite = spawn("conformance", ["authorization", "--url", issuer, "--client-id", id, "--resource", url], { stdio: ["ignore", "pipe", "inherit"] });
let said = "", opened = false;
suite.stdout.setEncoding("utf8").on("data", async (text) => {
  said += text;
  const [address] = said.match(/^http\S+\/oauth\/authorize\?\S+(?=\n)/m) || [];
  if (!address || opened) return;
  opened = true;
  await fetch(await consent(address));
});
const status = await new Promise((done) => suite.on("close", done));
assert.ok(status === 0 && /Total: [1-9]\d* passed, 0 failed/.test(said), said);
console.log("suite: " + said.trim().split("\n").at(-1));
