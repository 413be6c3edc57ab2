// A device's queue of tasks, its credentials, and the decisions about it.
import { html } from "../html.js";
import { get, path, query as encode, request } from "../api.js";
import { useActed, useData, useEvents, useImages } from "../data.js";
import { capital, clock } from "../format.js";
import { go, Link, to } from "../route.js";
import { s, word } from "../strings.js";
import { Act, Ask, Command, Facts, Loaded, Panel, Time } from "../ui.js";
import { line } from "../untrusted.js";
import { what } from "./jobs.js";

const GRACE = "1h"; // for which rotated credentials stay valid

// Queue is what waits for a device: what will be done, for which job, and why not yet. It follows events, and changes of this tab.
export function Queue({ device, can }) {
  const q = s.queue, url = path("v1", "devices", device.id, "tasks");
  const tasks = useData(async (signal) => {
    const [{ items }, jobs] = await Promise.all([get(url, signal), get("/v1/jobs" + encode({ device: device.id, limit: 200 }), signal)]);
    return items.map((t) => ({ ...t, spec: jobs.items.find((j) => j.id === t.job)?.spec }));
  }, [device.id, device.state]);
  useEvents((message) => (message.gap || message.events?.some((e) => (e.data.device ? e.type === "task" && e.data.device === device.id : e.type.startsWith("job.")))) && tasks.soon());
  useActed(tasks.soon);
  const image = useImages((tasks.data || []).filter((t) => t.spec), can);
  const cancel = (job) => async () => { await request("POST", path("v1", "devices", device.id, "tasks", job, "cancel")); tasks.reload(); };
  return html`<${Panel} title=${q.title} data-test="queue"><${Loaded} from=${tasks}>${(items) => (items.length ? html`<ul class="wrong whole">${items.map((t) => html`<li key=${t.job + t.round}><span aria-hidden="true">${t.state === "running" ? "▶" : "◐"}</span>
      <span><b><${Link} href=${to(["jobs", t.job])}><bdi>${line(t.spec ? what(t.spec.action, image) : t.job, 300)}</bdi><//></b>${t.spec?.action.call && html` <small class="mono">${line(t.spec.action.call.tool)}</small>`}<br />
        <small>${line([t.spec?.note, t.state === "running" ? q.running : q.waits(word("taskReason", t.reason)), t.due_at && q.due(clock(t.due_at))].filter(Boolean).join(", "), 400)}</small></span>
      <span>${can("jobs") && t.state === "waiting" && html`<${Act} label=${s.cancel} name=${q.cancel(line(t.spec ? what(t.spec.action, image) : t.job, 60))} act=${cancel(t.job)} />`}</span></li>`)}</ul>` : html`<p class="told">${q.empty}</p>`)}<//>
    <${Command} cli=${["queue", device.id]} url=${url} /><//>`;
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
        ${can("admin") && html`<${Link} class="button" href=${to(["access", "policy"], { device: d.id })}>${s.deviceAccess.explain}<//>`}</div></section>
    <${Panel} title=${s.deviceAccess.decisions}><${Loaded} from=${changes}>${({ items }) => (items.length ? html`<ol class="log">${items.map((c) => html`<li key=${c.revision}><span>${clock(c.at)}</span>
      <span>${capital(word("aspect", c.aspect.split(":")[0], c).replace(/^/, c.who === "device" ? "" : `${line(c.who, 60)} `))}</span></li>`)}</ol>` : html`<p class="told">${s.deviceAccess.noDecisions}</p>`)}<//><//>`;
}
