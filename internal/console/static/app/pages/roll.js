// A rollout of a release or an image: first what it would do to which devices, then the same rollout is started.
import { html, useState } from "../html.js";
import { get, query as encode } from "../api.js";
import { useData } from "../data.js";
import { count, short } from "../format.js";
import { codes, s, word } from "../strings.js";
import { Denied, Page, Problem } from "../ui.js";
import { line } from "../untrusted.js";
import { release, targetOf } from "./firmware.js";
import { Plan, readStages, usePlan } from "./newjob.js";

const f = s.firmware;
const ALLOWABLE = ["project", "layout", "version_too_old", "ota_url"]; // findings that a job may allow

export function Roll({ query, can }) {
  const [form, setForm] = useState({ image: query.get("image") || "", select: query.get("select") || "device=*", restart: "idle", allow: [] });
  const [asked, ask] = useState(form); // what the check is of: fields that were left
  const planned = usePlan(), { plan, error, clear } = planned;
  const images = useData((signal) => get("/v1/firmware" + encode({ limit: 1000 }), signal), []);
  const check = useData((signal) => (asked.image ? get("/v1/firmware/check" + encode({ ...targetOf(asked.image), select: asked.select, limit: 1 }), signal) : null), [asked.image, asked.select]);
  const missing = ["firmware", "jobs"].find((scope) => !can(scope));
  if (missing) return html`<${Page} title=${f.rollTitle} /><${Denied} scope=${missing} />`;
  const known = images.data?.items || [], { findings = {}, verdicts = {} } = check.data?.counts || {}, allowable = ALLOWABLE.filter((code) => findings[code]);
  const set = (name) => ({ target: { value } }) => setForm((before) => ({ ...before, [name]: value }));
  const toggle = (code) => ({ target: { checked } }) => setForm((before) => ({ ...before, allow: [...before.allow.filter((x) => x !== code), ...(checked ? [code] : [])] }));
  const show = (event) => {
    event.preventDefault();
    const target = targetOf(form.image), allow = form.allow.filter((code) => allowable.includes(code));
    const options = { restart: form.restart, ...(form.stay && { stay: form.stay }), ...(allow.length > 0 && { allow }) };
    const job = { select: form.select, ...(form.note && { note: form.note }) };
    planned.show(target.release ? "/v1/firmware/roll" : "/v1/jobs", () => ({ ...(target.release ? { ...target, firmware: options } : { action: { firmware: { ...target, ...options } } }), ...job, ...(form.stages && { stages: readStages(form.stages) }) }));
  };
  const field = (name, label, placeholder, rest) => html`<div class="field"><label for=${`roll-${name}`}>${label}</label><input id=${`roll-${name}`} value=${form[name] ?? ""} placeholder=${placeholder} spellcheck=${false} autocapitalize="off" autocomplete="off" onInput=${set(name)} ...${rest} /></div>`;
  return html`<${Page} title=${f.rollTitle} />
    <form onSubmit=${show} onInput=${clear} onChange=${() => ask(form)}>
      <section class="card">${field("image", f.target, "xiaozhi@2.4.2", { required: true, list: "roll-images" })}
        <datalist id="roll-images">${[...new Set(known.map(release))].map((name) => html`<option key=${name} value=${name}></option>`)}${known.map((i) => html`<option key=${i.id} value=${short(i.id)} label=${line(`${release(i)} ${i.boards.join(", ")}`, 100)}></option>`)}</datalist>
        ${field("select", s.jobs.selectHint, "room=lab", { required: true })}
        ${allowable.length > 0 && html`<fieldset data-test="allow"><legend>${f.allow}</legend>${allowable.map((code) => html`<label class="check" key=${code}><input type="checkbox" checked=${form.allow.includes(code)} onChange=${toggle(code)} /> ${word("taskCode", code)} (${count(findings[code])})</label>`)}</fieldset>`}</section>
      <section class="card"><div class="cards">${field("stages", s.jobs.stages, "1 30m, 5% 2h, 100%")}${field("stay", f.stay, "10m")}
        <div class="field"><label for="roll-restart">${f.restart}</label><select id="roll-restart" value=${form.restart} onChange=${set("restart")}>${Object.entries(f.restarts).map(([value, text]) => html`<option key=${value} value=${value}>${text}</option>`)}</select></div>
        ${field("note", s.jobs.note, "")}</div></section>
      <${Problem} error=${error}>${error?.problem?.errors?.map((x, i) => html`<p key=${i}><code>${line(x.pointer, 80)}</code> ${line(x.detail, 200)}</p>`)}<//>
      <div class="actions"><button class=${plan ? "" : "primary"}>${s.jobs.dryRun}</button></div>
    </form>
    ${plan && html`<${Plan} of=${planned} image=${(id) => known.find((i) => i.id === id)} left=${verdicts.already} />`}`;
}
