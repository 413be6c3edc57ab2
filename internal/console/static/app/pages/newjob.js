// A new job. First what it would do is shown, then the same job is started: what is sent is what was shown.
import { html, useRef, useState } from "../html.js";
import { get, path, query as encode, random, request } from "../api.js";
import { useData } from "../data.js";
import { clock, plural } from "../format.js";
import { encodeForm, fields, Fields } from "../form.js";
import { go, to } from "../route.js";
import { s } from "../strings.js";
import { Command, Facts, Page, Problem } from "../ui.js";
import { line } from "../untrusted.js";
import { what } from "./jobs.js";

// OPTIONS are single-line settings of a job: name, label, and where they stand in it.
const OPTIONS = [
  ["at", "at", "when.at", "datetime-local"], ["cron", "cron", "when.cron"], ["until", "until", "when.until", "datetime-local"], ["rate", "rate", "pace.rate"], ["concurrency", "concurrency", "pace.concurrency", "number"],
  ["stages", "stages", "stages"], ["failed", "stopFailed", "stop.failed", "number"], ["share", "stopShare", "stop.share"], ["retry", "retry", "retry.failed", "number"], ["note", "note", "note"],
];
const EXAMPLES = { cron: "0 3 * * *", rate: "30/m", concurrency: "10", stages: "1 30m, 5%, 100%", failed: "2", share: "5%", retry: "1" };

export function NewJob({ query, can }) {
  const [kind, setKind] = useState(Object.hasOwn(s.jobs.actions, query.get("kind")) ? query.get("kind") : "call");
  const ids = (query.get("devices") || "").split(",").filter(Boolean); // chosen one by one, in place of a selection
  const [select, setSelect] = useState(query.get("select") || "");
  const [tool, setTool] = useState(query.get("tool") || "");
  const [values, setValues] = useState(() => new Map());
  const [faults, setFaults] = useState(() => new Map());
  const [form, setForm] = useState({ when: "idle", busy: "" });
  const planned = usePlan(), { plan, error, clear } = planned;

  // The tools that are offered are those of one device of the selection.
  const example = useData(async (signal) => {
    const { items } = await get("/v1/devices" + encode({ select: ids.length ? `device=${ids[0]}` : select, limit: 1 }), signal);
    if (!items.length) return [];
    return (await get(path("v1", "devices", items[0].id, "tools") + encode({ user: can("tools:call:user") && "true" }), signal)).items;
  }, [select, ids[0]]);
  const tools = example.data || [];
  const chosen = tools.find((t) => t.name === tool);
  const list = chosen ? fields(chosen.inputSchema) : null;
  const set = (name) => (event) => setForm({ ...form, [name]: event.target.type === "checkbox" ? event.target.checked : event.target.value });

  const show = async (event) => {
    event.preventDefault();
    const encoded = list ? encodeForm(list, values) : { text: form.json || "{}", faults: new Map() };
    setFaults(encoded.faults);
    clear();
    if (kind !== "call" || !encoded.faults.size) await planned.show("/v1/jobs", () => write({ kind, select, ids, tool, text: encoded.text, form }));
  };
  return html`<${Page} title=${s.jobs.new} />
    <form onSubmit=${show} onInput=${clear} noValidate>
      <section class="card"><h2>${s.jobs.which}</h2>${ids.length ? html`<p data-test="chosen">${s.jobs.chosen(ids.length)}</p>` : html`<div class="field"><label for="select">${s.jobs.selectHint}</label><input id="select" value=${select} spellcheck=${false} autocapitalize="off" onChange=${(e) => setSelect(e.target.value.trim())} /></div>
        <label class="check"><input type="checkbox" checked=${form.follow} onChange=${set("follow")} /> ${s.jobs.follow}</label>`}</section>
      <section class="card"><h2>${s.jobs.action}</h2><div class="chips" role="radiogroup" aria-label=${s.jobs.action}>${Object.entries(s.jobs.actions).map(([name, text]) => html`<label class="check chip" key=${name}><input type="radio" name="kind" checked=${kind === name} onChange=${() => setKind(name)} /> ${text}</label>`)}</div>
        ${kind === "call" && html`<div class="field"><label for="tool">${s.jobs.tool}</label><input id="tool" list="tools" value=${tool} spellcheck=${false} autocapitalize="off" autocomplete="off" onInput=${(e) => { setTool(e.target.value); setValues(new Map()); }} />
            <datalist id="tools">${tools.map((t, i) => html`<option key=${i} value=${t.name}></option>`)}</datalist></div>
          ${list ? html`<${Fields} list=${list} values=${values} faults=${faults} onChange=${(v) => { setValues(v); clear(); }} />`
            : html`<div class="field"><label for="json">${s.tools.asJSON}</label><textarea id="json" class="mono" rows="4" spellcheck=${false} value=${form.json ?? "{}"} onInput=${set("json")}></textarea></div>`}
          <label class="check"><input type="checkbox" checked=${form.repeatable} onChange=${set("repeatable")} /> ${s.jobs.repeatable}</label>`}
        ${kind === "message" && html`<div class="field"><label for="status">${s.jobs.status}</label><input id="status" value=${form.status ?? ""} onInput=${set("status")} /></div><div class="field"><label for="message">${s.jobs.message}</label><textarea id="message" rows="3" value=${form.message ?? ""} onInput=${set("message")}></textarea></div>`}
        ${kind === "restart" && html`<div class="field"><label for="when">${s.jobs.restartWhen}</label><select id="when" value=${form.when} onChange=${set("when")}><option value="idle">${s.jobs.idle}</option><option value="now">${s.jobs.now}</option></select></div>`}</section>
      <details class="card"><summary><h2>${s.jobs.how}</h2></summary><div class="cards">${OPTIONS.map(([name, label, , type]) => html`<div class="field" key=${name}><label for=${`job-${name}`}>${s.jobs[label]}</label><input id=${`job-${name}`} type=${type || "text"} placeholder=${EXAMPLES[name] || ""} value=${form[name] ?? ""} onInput=${set(name)} /></div>`)}
        <div class="field"><label for="busy">${s.jobs.busy}</label><select id="busy" value=${form.busy} onChange=${set("busy")}><option value="">${s.jobs.wait}</option><option value="skip">${s.jobs.skip}</option></select></div></div></details>
      <${Problem} error=${error}>${error?.problem?.errors?.map((f, i) => html`<p key=${i}><code>${line(f.pointer, 80)}</code> ${line(f.detail, 200)}</p>`)}<//>
      <div class="actions"><button class=${plan ? "" : "primary"}>${s.jobs.dryRun}</button></div>
    </form>
    ${plan && html`<${Plan} of=${planned} />`}`;
}

// usePlan shows what jobs would do, and starts the same ones.
export function usePlan() {
  const [plan, setPlan] = useState(null); // {url, body, items}
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const once = useRef("");
  const show = async (url, write) => {
    setError(null);
    setPlan(null);
    try {
      const body = write(), answer = await request("POST", `${url}?dry_run=true`, { body });
      once.current = random();
      setPlan({ url, body, items: answer.items || [answer] });
    } catch (problem) {
      setError(problem);
    }
  };
  const start = async () => {
    setBusy(true);
    setError(null);
    try {
      const what = plan.items.map((p) => `${s.jobs.start(p.devices)}. ${s.jobs.guard(p.spec)} ${s.jobs.risk(p.at_risk, p.devices)}`).join(" ");
      const made = await request("POST", plan.url, { body: plan.body, headers: { "Idempotency-Key": once.current }, what }), jobs = made.items || [made];
      go(jobs.length > 1 ? to(["jobs"], { group: made.group }) : to(["jobs", jobs[0].id]));
    } catch (problem) {
      setError(problem);
      setBusy(false);
    }
  };
  return { plan, error, busy, show, start, clear: () => setPlan(null) };
}

// write makes the body of a request. Arguments stay the text that they were, and are refused if they are not JSON.
function write({ kind, select, ids, tool, text, form }) {
  const job = new Map([ids.length ? ["devices", JSON.stringify(ids)] : ["select", JSON.stringify(select)]]);
  if (kind === "call") {
    try {
      JSON.parse(text);
    } catch (error) {
      throw new Error(s.tools.invalidJSON(error.message), { cause: error });
    }
    job.set("action", `{"call":{"tool":${JSON.stringify(tool)},"arguments":${text}}}`);
    if (form.repeatable) job.set("repeatable", "true");
  } else if (kind === "message") job.set("action", JSON.stringify({ message: { type: "alert", status: form.status || "", message: form.message || "" } }));
  else job.set("action", JSON.stringify({ restart: { when: form.when } }));
  if (form.follow && !ids.length) job.set("follow", "true");
  if (form.busy) job.set("busy", JSON.stringify(form.busy));
  const parts = new Map();
  for (const [name, , where, type] of OPTIONS) {
    const value = String(form[name] ?? "").trim();
    if (!value) continue;
    const [member, inner] = where.split(".");
    const written = name === "stages" ? readStages(value) : type === "number" ? Number(value) : type === "datetime-local" ? new Date(value).toISOString() : value;
    if (inner) parts.set(member, { ...parts.get(member), [inner]: written });
    else job.set(member, JSON.stringify(written));
  }
  for (const [member, value] of parts) job.set(member, JSON.stringify(value));
  return `{${[...job].map(([name, json]) => `${JSON.stringify(name)}:${json}`).join(",")}}`;
}

// readStages reads "1 30m, 5%, 100%": a number or a share, and how long to wait after it.
export const readStages = (text) => text.split(",").map((part) => {
  const [ok, soak] = part.trim().split(/\s+/);
  return { ok: ok.endsWith("%") ? ok : Number(ok), ...(soak && { soak }) };
});

// reveal brings the plan, which is below a long form, into view.
const reveal = (plan) => plan?.scrollIntoView({ block: "nearest" });

// Plan shows what jobs would do, one for each image of a rollout. What can go wrong stands before the button, and where nothing would
// begin there is none. left are devices that need nothing, and that the plans do not tell apart.
export function Plan({ of: { plan, busy, start }, image, left = 0 }) {
  const begin = (p) => p.devices - p.refusals.reduce((n, r) => n + r.count, 0);
  const items = plan.items.filter((p) => p.devices > 0 || plan.items.length === 1), total = items.reduce((n, p) => n + begin(p), 0) - left;
  return html`<section class="card" ref=${reveal} data-test="plan" aria-label=${s.jobs.plan}><h2>${s.jobs.plan}</h2>
    ${items.map((p, i) => html`<div key=${i}>${p.spec.action.firmware && html`<h3>${line(what(p.spec.action, image), 300)}</h3>`}
      <p class="number-big">${p.spec.action.firmware ? s.firmware.gets(begin(p), p.devices, p.online) : s.jobs.planDevices(p.devices, p.online)}</p>${p.spec.action.firmware ? "" : html`<p>${s.jobs.estimated(p.estimated)}</p>`}
      <${Facts} items=${[[s.jobs.action, !p.spec.action.firmware && html`<bdi>${line(what(p.spec.action), 1000)}</bdi>`], [s.jobs.until, p.spec.when?.until && clock(p.spec.when.until)], [s.jobs.stages, p.spec.action.firmware && s.firmware.stages(p.spec.stages || [])]]} />
      ${p.refusals.length > 0 && html`<p><b>${s.jobs.refusals}</b></p><ul>${p.refusals.map((r, j) => html`<li key=${j}>${plural(r.count, "device")}: ${line(r.detail, 600)}</li>`)}</ul>`}
      ${p.no_way_back > 0 && html`<p class="notice warn">${s.firmware.noWayBack(p.no_way_back)}</p>`}
      ${p.confirm.length > 0 && html`<p class="notice warn">${s.jobs.confirmations(line(p.confirm.join(", "), 600))}</p>`}
      ${begin(p) > 0 && html`<p data-test="risk"><b>${s.jobs.guard(p.spec)} ${s.jobs.risk(p.at_risk, begin(p))}</b></p>`}</div>`)}
    ${plan.items.length > items.length && html`<p class="faint">${s.firmware.noDevice(plan.items.length - items.length)}</p>`}${left > 0 && html`<p>${s.firmware.left(left)}</p>`}
    ${total > 0 ? html`<div class="actions"><button type="button" class="primary" disabled=${busy} onClick=${start}>${s.jobs.start(total)}</button></div>`
      : html`<p class="problem">${left > 0 ? s.firmware.nothingLeft : items.some((p) => p.devices > 0) ? s.jobs.allRefused : s.jobs.noDevices}</p>`}
    <${Command} method="POST" url=${plan.url} body=${typeof plan.body === "string" ? JSON.parse(plan.body) : plan.body} /></section>`;
}
