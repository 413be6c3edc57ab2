// The official TypeScript SDK v1 as a host of fleetd: node sdk1.mjs URL DEVICE REBOOT, where REBOOT is a command that makes
// the device go and come. After any number of errors one GET is open at rest, no notification comes twice, and a stream
// that was cut is resumed. It needs @modelcontextprotocol/sdk beside it or above it.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { setTimeout as sleep } from "node:timers/promises";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { ResourceUpdatedNotificationSchema } from "@modelcontextprotocol/sdk/types.js";

const [url, device, ...reboot] = process.argv.slice(2);
const uri = `fleet://devices/${device}`;

let begun = 0; // GETs
let open = 0; // GETs whose answer has not ended
let cut = () => {}; // ends the stream of the last GET, as a network does
const watched = async (input, init) => {
  const response = await fetch(input, init);
  if (init?.method !== "GET") return response;
  begun++;
  if (!response.ok) return response;
  open++;
  const reader = response.body.getReader();
  const body = new ReadableStream({
    start(out) {
      let ended = false;
      const end = (error) => {
        if (ended) return;
        ended = true;
        open--;
        error ? out.error(error) : out.close();
      };
      cut = () => {
        end(new Error("cut by the test"));
        reader.cancel().catch(() => {});
      };
      (async () => {
        for (;;) {
          const { done, value } = await reader.read();
          if (ended) return;
          if (done) return end();
          out.enqueue(value);
        }
      })().catch(end);
    },
  });
  return new Response(body, { status: response.status, headers: response.headers });
};

const client = new Client({ name: "sdk-v1", version: "1" });
const updates = [];
client.setNotificationHandler(ResourceUpdatedNotificationSchema, (n) => void updates.push(n.params.uri));
await client.connect(new StreamableHTTPClientTransport(new URL(url), { fetch: watched }));
await client.subscribeResource({ uri });

// awaitUpdate waits until the count of updates has changed and then stays.
const settled = async (before) => {
  const end = Date.now() + 30_000;
  while (updates.length === before) {
    assert.ok(Date.now() < end, "no notification came within 30 s");
    await sleep(100);
  }
  await sleep(4000);
  return updates.length - before;
};
const rebooted = async () => {
  const before = updates.length;
  execFileSync(reboot[0], reboot.slice(1), { stdio: "ignore" });
  return settled(before);
};

// A reboot is two changes, that the device has gone and that it is back, of which one notification tells if they are close
// together.
const changes = 2;
const usual = await rebooted();
assert.ok(usual <= changes, `${usual} notifications of a reboot`);
for (let n = 0; n < 5; n++) {
  await assert.rejects(client.callTool({ name: "no_such_tool", arguments: {} }));
  await assert.rejects(client.readResource({ uri: "fleet://nothing" }));
}
await sleep(5000);
const before = begun;
await sleep(10_000);
assert.ok(begun - before <= 1, `${begun - before} GETs in 10 s at rest, after 10 errors`);
assert.equal(open, 1, "streams that are open at rest");
const after = await rebooted();
assert.ok(after <= changes, `${after} notifications of a reboot after the errors, ${usual} before them`);

cut();
execFileSync(reboot[0], reboot.slice(1), { stdio: "ignore" });
const resumed = await settled(updates.length);
assert.ok(resumed >= 1 && resumed <= changes, `${resumed} notifications of a reboot over the cut, ${usual} before it`);
assert.equal(open, 1, "streams that are open after the cut");
await client.close();
console.log(`sdk v1: ${usual} notifications of a reboot, ${after} after 10 errors, ${resumed} over a cut; ${begun} GETs in all`);
