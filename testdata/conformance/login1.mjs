// The official TypeScript SDK v1 as a host that logs in: node login1.mjs URL FLEETD DATA_DIR. A person's part is played here:
// the consent page is fetched and its form sent, with a code of `fleetd keys allow`.
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { UnauthorizedError } from "@modelcontextprotocol/sdk/client/auth.js";
import { logIn } from "./login.mjs";

await logIn({ Client, Transport: StreamableHTTPClientTransport, UnauthorizedError, name: "sdk1" });
