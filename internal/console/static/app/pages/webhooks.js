// Where do events go outside of the fleet? Webhooks: how each one is, and what changes it.
import { html, useState } from "../html.js";
import { get, path, query as encode, request } from "../api.js";
import { useData } from "../data.js";
import { capital, count, milliseconds } from "../format.js";
import { setQuery } from "../route.js";
import { s, word } from "../strings.js";
import { Act, Ask, Command, Copyable, Dialog, Grid, Loaded, Outcome, Page, Pager, Problem, Time } from "../ui.js";
import { line, Said } from "../untrusted.js";

const EVERY = 5_000; // a delivery and its failure come without an event

// TYPES are the kinds of events that are kept, and so can be delivered later.
const TYPES = ["online", "offline", "catalog", "notifications", "photo", "firmware", "pending", "contested", "task", "job.started", "job.stage", "job.paused", "job.halted", "job.resumed", "job.done", "job.cancelled", "webhook.disabled"];

const c = s.webhooks.columns;

export function Webhooks({ query }) {
  const cursor = query.get("cursor") || "";
  const list = useData((signal) => get("/v1/webhooks" + encode({ cursor, limit: 100 }), signal), [cursor], { every: EVERY });
  const [open, setOpen] = useState(null); // {hook}, a new one has none
  const [made, setMade] = useState(null); // a webhook with the secret that was made for it
  const saved = (hook) => {
    setOpen(null);
    setMade(hook.secret ? hook : null);
    list.reload();
  };
  const columns = [...COLUMNS, { name: c.change, text: () => "", cell: (h) => html`<${Buttons} hook=${h} onEdit=${() => setOpen({ hook: h })} onDeleted=${list.reload} />`, keep: true, bare: true }];
  return html`<${Page} title=${s.webhooks.title} /><p>${s.webhooks.lead}</p>
    <div class="actions"><button type="button" class="primary" onClick=${() => setOpen({})}>${s.webhooks.create}</button></div>
    ${open && html`<${Form} hook=${open.hook} onClose=${() => setOpen(null)} onSaved=${saved} />`}
    ${made && html`<section class="notice warn" data-test="secret"><p>${s.webhooks.secretOnce} <bdi>${line(made.url, 200)}</bdi></p><${Copyable} text=${made.secret} /><button type="button" onClick=${() => setMade(null)}>${s.close}</button></section>`}
    <section class="panel"><${Loaded} from=${list}>${({ items }) => (items.length ? html`<${Grid} columns=${columns} items=${items} id=${(h) => h.id} />` : html`<p class="blank">${s.webhooks.empty}</p>`)}<//></section>
    <${Pager} next=${list.data?.next_cursor} cursor=${cursor} onCursor=${(c) => setQuery({ cursor: c })} />
    <${Command} cli=${["webhooks", "list"]} url="/v1/webhooks" />`;
}

const COLUMNS = [
  { name: c.address, text: (h) => h.id, cell: (h) => html`<${Said} text=${h.url} max=${2000} />`, keep: true },
  { name: c.state, text: (h) => h.state + h.failing_since, cell: (h) => html`<${Outcome} tone=${h.state === "active" ? "good" : "bad"}>${line(word("webhook", h.state), 60)}<//>${h.state === "failing" && html` <small>${s.webhooks.since} <${Time} at=${h.failing_since} /></small>`}`, bare: true, keep: true },
  { name: c.types, text: (h) => `${h.types.map((x) => word("eventType", x)).join(", ")}${h.offline_for ? ` · ${s.webhooks.after(h.offline_for)}` : ""}`, kind: "names" },
  { name: c.devices, text: (h) => h.select || s.webhooks.allDevices }, { name: c.error, text: (h) => h.reason || h.last_error, kind: "names" },
  { name: c.delivered, kind: "right", text: (h) => h.delivered, cell: (h) => html`${count(h.delivered)}${h.delivered_at && html` <small><${Time} at=${h.delivered_at} /></small>`}`, keep: true }, { name: c.by, text: (h) => h.created_by }];

// Buttons are what can be done with a webhook, and what its test gave.
function Buttons({ hook: h, onEdit, onDeleted }) {
  const [result, setResult] = useState(null);
  const url = path("v1", "webhooks", h.id);
  const test = async () => {
    setResult(null);
    setResult(await request("POST", url + "/test"));
  };
  const remove = async () => { await request("DELETE", url); onDeleted(); };
  return html`<div class="buttons"><${Act} label=${s.webhooks.test} act=${test} /><button type="button" onClick=${onEdit}>${s.webhooks.edit}</button>
      <${Ask} label=${s.webhooks.delete} question=${s.webhooks.deleteAsk(line(h.url, 200))} danger act=${remove} /></div>
    <p role="status" data-test="test">${result && html`<${Outcome} tone=${result.delivered ? "good" : "bad"}>${result.delivered ? s.webhooks.delivered(result.status, milliseconds(result.duration_ms)) : s.webhooks.failed(milliseconds(result.duration_ms))}<//> ${line(result.error, 300)}`}</p>`;
}

// Form creates a webhook, or changes one: then it sends only what differs, so that it overwrites nothing else.
function Form({ hook, onClose, onSaved }) {
  const before = hook || { url: "", types: ["offline", "online"], select: "", offline_for: "" };
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    if (busy) return;
    const form = new FormData(event.target);
    const body = Object.fromEntries(["url", "select", "offline_for", "secret"].map((name) => [name, form.get(name).trim()]));
    body.types = form.getAll("type");
    for (const name of ["url", "select", "offline_for", "types"]) if (hook && String(body[name]) === String(before[name])) delete body[name];
    if (form.get("enable")) body.state = "active";
    if (!body.secret && !form.get("fresh")) delete body.secret; // a new webhook gets one, another keeps its own
    setBusy(true);
    setError(null);
    try {
      onSaved(await request(hook ? "PATCH" : "POST", hook ? path("v1", "webhooks", hook.id) : "/v1/webhooks", { body }));
    } catch (problem) {
      setError(problem);
      setBusy(false);
    }
  };
  return html`<${Dialog} title=${hook ? s.webhooks.edit : s.webhooks.create} onClose=${onClose}><form onSubmit=${submit}>
    <div class="field"><label for="hook-url">${s.webhooks.url}</label><input id="hook-url" name="url" type="url" required autofocus autocomplete="off" spellcheck=${false} defaultValue=${before.url} /></div>
    <fieldset><legend>${s.webhooks.types}</legend>${TYPES.map((type) => html`<label class="check" key=${type}><input type="checkbox" name="type" value=${type} defaultChecked=${before.types.includes(type)} /> ${capital(word("eventType", type))}</label>`)}</fieldset>
    <div class="field"><label for="hook-select">${s.webhooks.select}</label><input id="hook-select" name="select" placeholder="room=lab" spellcheck=${false} autocapitalize="off" defaultValue=${before.select} /></div>
    <div class="field"><label for="hook-offline">${s.webhooks.offlineFor}</label><input id="hook-offline" name="offline_for" placeholder="10m" spellcheck=${false} autocapitalize="off" defaultValue=${before.offline_for} /></div>
    <div class="field"><label for="hook-secret">${hook ? s.webhooks.otherSecret : s.webhooks.secret}</label><input id="hook-secret" name="secret" type="password" autocomplete="off" spellcheck=${false} /></div>
    ${hook && html`<label class="check"><input type="checkbox" name="fresh" /> ${s.webhooks.fresh}</label>`}
    ${hook?.state === "disabled" && html`<label class="check"><input type="checkbox" name="enable" defaultChecked /> ${s.webhooks.enable}</label>`}
    <${Problem} error=${error} /><div class="actions"><button class="primary" disabled=${busy}>${hook ? s.save : s.webhooks.create}</button><button type="button" onClick=${onClose}>${s.cancel}</button></div></form><//>`;
}
