// A device's queue of tasks, its credentials, and the decisions about it.
import { html } from "../html.js";
import { get, path, query as encode, request } from "../api.js";
import { useData } from "../data.js";
import { clock } from "../format.js";
import { go, Link, to } from "../route.js";
import { s, word } from "../strings.js";
import { Act, Ask, Command, Empty, Facts, Loaded, Time } from "../ui.js";
import { line } from "../untrusted.js";
import { TaskState } from "./jobs.js";

const GRACE = "1h"; // for which rotated credentials stay valid

export function Queue({ device, can }) {
  const tasks = useData((signal) => get(path("v1", "devices", device.id, "tasks"), signal), [device.id], { every: 5000 });
  const cancel = (job) => async () => { await request("POST", path("v1", "devices", device.id, "tasks", job, "cancel")); tasks.reload(); };
  return html`<${Loaded} from=${tasks}>${({ items }) => (items.length ? html`<ol class="log">${items.map((t) => html`<li key=${t.job + t.round}>
      <span><${Time} at=${t.due_at} exact /></span><span><${Link} href=${to(["jobs", t.job])}>${t.job}<//> <${TaskState} task=${t} />
      ${t.reason && html` · ${word("taskReason", t.reason)}`} ${can("jobs") && t.state === "waiting" && html`<${Act} label=${s.queue.cancel} act=${cancel(t.job)} />`}</span></li>`)}</ol>` : html`<${Empty}>${s.queue.empty}<//>`)}<//>
    <${Command} cli=${["queue", device.id]} url=${path("v1", "devices", device.id, "tasks")} />`;
}

export function DeviceAccess({ device: d, reload, can }) {
  const changes = useData((signal) => get(path("v1", "devices", d.id, "changes") + encode({ limit: 100 }), signal), [d.id, d.revision]);
  const post = (verb, body) => async () => { await request("POST", path("v1", "devices", d.id, verb), { body }); reload(); };
  const forget = async () => { await request("DELETE", path("v1", "devices", d.id)); go(to(["devices"])); };
  return html`<section class="card"><h2>${s.deviceAccess.credentials}</h2>
      ${d.admission === "revoked" && html`<p class="notice warn">${s.deviceAccess.revoked}</p>`}
      <${Facts} items=${[[s.deviceAccess.generation, String(d.credentials.generation)], [s.deviceAccess.previous, d.credentials.previous_until && html`<${Time} at=${d.credentials.previous_until} exact />`]]} />
      <div class="actions">
        ${d.admission === "revoked" && !d.pending.length && html`<${Act} label=${s.device.approve} primary act=${post("approve")} />`}
        <${Ask} label=${s.deviceAccess.rotate} question=${s.deviceAccess.rotateAsk} act=${post("rotate", { grace: GRACE })} />
        <${Ask} label=${s.deviceAccess.revoke} question=${s.deviceAccess.revokeAsk} danger act=${post("revoke")} />
        <${Ask} label=${s.deviceAccess.forget} question=${s.deviceAccess.forgetAsk} phrase=${d.id} danger act=${forget} />
        ${can("admin") && html`<${Link} class="button" href=${to(["access", "explain"], { device: d.id })}>${s.deviceAccess.explain}<//>`}</div></section>
    <section class="card"><h2>${s.deviceAccess.decisions}</h2><${Loaded} from=${changes}>${({ items }) => (items.length ? html`<ol class="log">${items.map((c) => html`<li key=${c.revision}><span>${clock(c.at)}</span>
      <span>${c.aspect} <code>${line(JSON.stringify(c.value ?? ""), 200)}</code> <small>${line(c.who, 60)}</small></span></li>`)}</ol>` : html`<p class="faint">${s.deviceAccess.noDecisions}</p>`)}<//></section>`;
}
