// What hosts do to log in, and what a person does meanwhile.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";

const [url, fleetd, dataDir] = process.argv.slice(2);
const issuer = new URL(url).origin;
const command = (...args) => execFileSync(fleetd, [...args, "--data-dir", dataDir], { encoding: "utf8", stdio: ["ignore", "pipe", "ignore"] }).trim();

// consent sends the form of the consent page, as a browser does, and returns the address that it goes to.
export async function consent(address, pattern = /Allow <strong>/) {
  const page = await fetch(address);
  const text = await page.text();
  assert.equal(page.status, 200, text);
  assert.match(text, pattern);
  const form = new URLSearchParams({ secret: command("keys", "allow"), decision: "allow" });
  for (const [, scope] of text.matchAll(/name="scope" value="([^"]+)"/g)) form.append("scope", scope);
  const answer = await fetch(address, { method: "POST", body: form, headers: { Origin: issuer }, redirect: "manual" });
  assert.equal(answer.status, 303, await answer.text());
  const to = new URL(answer.headers.get("location"));
  assert.equal(to.searchParams.get("iss"), issuer);
  return to;
}

// validGrants are the grants whose application calls itself so.
export const validGrants = (name) => JSON.parse("[" + command("keys", "--json").split("\n").filter(Boolean).join(",") + "]").filter((k) => k.grant?.name === name && k.state === "valid");

// provider keeps what a host keeps.
function provider(name) {
  const kept = {};
  return {
    kept,
    redirectUrl: "http://localhost:39999/callback",
    clientMetadata: { client_name: name, redirect_uris: ["http://localhost:39999/callback"], grant_types: ["authorization_code", "refresh_token"], response_types: ["code"], token_endpoint_auth_method: "none" },
    state: () => "state of " + name,
    clientInformation: () => kept.client,
    saveClientInformation: (client) => { kept.client = client; },
    tokens: () => kept.tokens,
    saveTokens: (tokens) => { kept.tokens = tokens; },
    redirectToAuthorization: (address) => { kept.address = address; },
    saveCodeVerifier: (verifier) => { kept.verifier = verifier; },
    codeVerifier: () => kept.verifier,
    saveDiscoveryState: (state) => { kept.discovery = state; },
    discoveryState: () => kept.discovery,
    invalidateCredentials: (what) => { if (what === "all" || what === "tokens") delete kept.tokens; },
  };
}

export async function logIn({ Client, Transport, UnauthorizedError, name }) {
  const auth = provider(name);
  const open = () => new Transport(new URL(url), { authProvider: auth });
  let transport = open();
  const first = new Client({ name, version: "1" });
  await assert.rejects(first.connect(transport), (e) => e instanceof UnauthorizedError, "a host without a token is sent to log in");
  assert.ok(auth.kept.client?.client_id, "it registered");
  const back = (await consent(auth.kept.address)).searchParams;
  await transport.finishAuth(back.get("code"), back.get("iss"));
  const scope = auth.kept.tokens.scope;

  let client = new Client({ name, version: "1" });
  await client.connect(open());
  const { tools } = await client.listTools();
  assert.ok(tools.some((tool) => tool.name === "find_devices"));
  const found = await client.callTool({ name: "find_devices", arguments: {} });
  assert.ok(!found.isError, JSON.stringify(found));

  // A token that is not valid any more is replaced without a person.
  const before = auth.kept.tokens.refresh_token;
  auth.kept.tokens = { ...auth.kept.tokens, access_token: auth.kept.tokens.access_token.slice(0, -4) + "AAAA" };
  assert.ok(!(await client.callTool({ name: "find_devices", arguments: {} })).isError);
  assert.notEqual(auth.kept.tokens.refresh_token, before, "it was refreshed");
  await client.close();

  // A grant that was ended is ended: the host has to ask again.
  const grants = validGrants(name);
  assert.equal(grants.length, 1);
  assert.equal(grants[0].grant.registered, true);
  command("keys", "revoke", grants[0].id);
  client = new Client({ name, version: "1" });
  delete auth.kept.address;
  await assert.rejects(client.connect(open()));
  assert.ok(auth.kept.address, "it is sent to log in again");
  console.log(`${name}: logged in with ${scope}, refreshed, revoked`);
}
