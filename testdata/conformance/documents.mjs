// The documents by which hosts name themselves, over TLS: node documents.mjs CERTIFICATE KEY DOCUMENTS PORT-FILE
import { readFileSync, writeFileSync } from "node:fs";
import { createServer } from "node:https";

const [cert, key, documents, portFile] = process.argv.slice(2);
const all = JSON.parse(readFileSync(documents, "utf8"));
const server = createServer({ cert: readFileSync(cert), key: readFileSync(key) }, (request, answer) => {
  const found = all.find((d) => d.client_id === `https://${request.headers.host}${request.url}`);
  answer.writeHead(found ? 200 : 404, { "Content-Type": "application/json" });
  answer.end(found && JSON.stringify(found));
});
server.listen(0, "127.0.0.1", () => writeFileSync(portFile, String(server.address().port)));
