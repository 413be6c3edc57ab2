// A program that uses the types which openapi-typescript generates from docs/reference/openapi.json: the calls of the
// README. scripts/openapi-client checks the types in its comments and runs it with the API's address and the admin token.
import createClient from "openapi-fetch";

const [url, admin] = /** @type {[string, string]} */ (/** @type {unknown} */ (process.argv.slice(2)));
/** @param {string} token @returns {import("openapi-fetch").Client<import("./api.js").paths>} */
const as = (token) => createClient({ baseUrl: url, headers: { Authorization: `Bearer ${token}` } });
const client = as(admin);
/** @type {(holds: unknown, ...what: unknown[]) => asserts holds} */
function check(holds, ...what) {
  if (!holds) throw new Error(JSON.stringify(what));
}

const devices = await client.GET("/v1/devices", { params: { query: { select: "state=online" } } });
const device = devices.data?.items[0]?.id;
check(device, "devices", devices.error);
const tools = await client.GET("/v1/devices/{device}/tools", { params: { path: { device } } });
check(tools.data?.items.length, "tools", tools.error);
/** @param {typeof client} by @param {number} volume */
const call = (by, volume) =>
  by.POST("/v1/devices/{device}/tools/{tool}/call", { params: { path: { device, tool: "self.audio_speaker.set_volume" } }, body: { arguments: { volume } } });
const good = await call(client, 40);
check(good.response.status === 200 && good.data && "content" in good.data && !good.data.isError, "volume 40", good.error);
const bad = await call(client, 400);
check(bad.response.status === 422 && bad.error?.code === "invalid_arguments", "volume 400", bad.error);
const key = await client.POST("/v1/keys", { body: { name: "generated client", scopes: ["devices:read"] } });
check(key.data?.token && key.data.id, "key", key.error);
const refused = await call(as(key.data.token), 40);
check(refused.response.status === 403, "a key that may only read calls a tool", refused);
console.log("openapi-client: devices, tools, calls and keys through the generated client");
