// A client that waits for approval as a device. One that waits beside another, admitted client looks like a copy of the device:
// both are shown, and it can be refused without touching the device.
import { html } from "../html.js";
import { get, path, query as encode, request } from "../api.js";
import { useData } from "../data.js";
import { s } from "../strings.js";
import { Act } from "../ui.js";
import { line } from "../untrusted.js";

export function Waiting({ device, client, address, can, done }) {
  const copy = device.admission && device.client && device.client !== client;
  const log = useData((signal) => copy && can("events:read") && get(path("v1", "devices", device.id, "recording") + encode({ kind: "connected", limit: 1 }), signal), [device.id]);
  const act = (method, rest, body) => async () => { await request(method, path("v1", "devices", device.id, ...rest), { body }); done(); };
  const shown = (label, client, address) => html`${label} <code>${line(client)}</code> ${line(address)}<br />`;
  return html`${copy && html`${s.admissions.copy}<br />${shown(s.device.facts.client, device.client, log.data?.items?.[0]?.address)}`}${shown(s.admissions.waiting, client, address)}
    ${can("devices:write") && html`<${Act} label=${s.device.approve} act=${act("POST", ["approve"], { client })} /> <${Act} label=${s.admissions.refuse} act=${act("DELETE", ["clients", client])} />`}`;
}
