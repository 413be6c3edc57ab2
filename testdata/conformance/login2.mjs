// The official TypeScript SDK v2 as a host that logs in; see login1.mjs.
import { Client, StreamableHTTPClientTransport, UnauthorizedError } from "@modelcontextprotocol/client";
import { logIn } from "./login.mjs";

await logIn({ Client, Transport: StreamableHTTPClientTransport, UnauthorizedError, name: "sdk2" });
