// The clients that use the id of a device: the one that is admitted, and those that wait for approval. One that waits beside another
// looks like a copy: both are shown, and it can be refused without touching the device.
import { html } from "../html.js";
import { get, path, query as encode, request } from "../api.js";
import { useData } from "../data.js";
import { s } from "../strings.js";
import { Act, Ask, Grid, Time } from "../ui.js";
import { line } from "../untrusted.js";

// isClaimed reports whether more clients than one use the id of a device.
export const isClaimed = (d) => d.state === "contested" || !!(d.admission && d.client && d.pending.some((w) => w.client !== d.client));

export function Clients({ device: d, can, done }) {
  const claimed = isClaimed(d), a = s.admissions;
  const log = useData((signal) => claimed && can("events:read") && get(path("v1", "devices", d.id, "log") + encode({ limit: 200 }), signal), [d.id]);
  const addresses = [...new Set((log.data?.items || []).filter((r) => ["connected", "connect.refused"].includes(r.kind)).map((r) => r.address).filter(Boolean))];
  const act = (method, rest, body) => async () => { await request(method, path("v1", "devices", d.id, ...rest), { body }); done(); };
  const admitted = d.admission && d.client && [{ client: d.client, role: a.admitted, address: d.pending.length ? addresses[0] : addresses.join(", "), since: d.connected_at }];
  const buttons = ({ client, role }) => !role && can("devices:write") && html`<span class="buttons">${client && html`<${Act} label=${a.refuse} act=${act("DELETE", ["clients", client])} />`}${claimed ? html`<${Ask} label=${a.replace} question=${a.replaceAsk} act=${act("POST", ["approve"], { client })} />` : html`<${Act} label=${s.device.approve} primary act=${act("POST", ["approve"], { client })} />`}</span>`;
  return html`${claimed && html`<p class="told">${d.pending.length ? a.copy : a.contested}</p>`}<${Grid} id=${(c) => c.client + !!c.role} items=${[...(claimed && admitted || []), ...d.pending]} columns=${[
    { name: a.client, text: (c) => (c.role || a.waits), keep: true }, { name: s.device.facts.id, text: (c) => c.client, cell: (c) => html`<code>${line(c.client)}</code>`, keep: claimed },
    { name: a.address, text: (c) => c.address, keep: claimed }, { name: a.since, text: (c) => c.since, cell: (c) => c.since && html`<${Time} at=${c.since} />` }, { name: a.decide, text: () => "", cell: buttons, keep: d.pending.length > 0, bare: true }]} />`;
}
