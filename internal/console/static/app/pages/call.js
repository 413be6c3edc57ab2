// Why did a call fail, or why is a device not well? The verdict, its evidence, and what to try.
import { html } from "../html.js";
import { get, path } from "../api.js";
import { useData } from "../data.js";
import { capital, clock, milliseconds } from "../format.js";
import { Link, go, to } from "../route.js";
import { s, word } from "../strings.js";
import { Act, Command, Empty, Facts, Page, Problem } from "../ui.js";
import { line } from "../untrusted.js";

const EVERY = 5_000; // a cause may appear without an event

// STEPS are what a person can do here in place of a command that an explanation names: the words of a label, the scope that it needs,
// and where it leads.
const STEPS = {
  "fleetd doctor": ["doctor", "admin", ({ device }) => to(["doctor"], { device })],
  "fleetd log": ["log", "events:read", ({ device }) => to(["devices", device, "timeline"])],
  "fleetd nodes": ["nodes", "admin", () => to(["nodes"])],
  "fleetd tools": ["tools", "devices:read", ({ device, tool }) => to(["devices", device, "tools"], { user: "1", tool })],
  "fleetd explain --strangers": ["strangers", "devices:write", () => to(["admissions"])],
  "fleetd explain": ["explain", "events:read", ({ device }) => to(["devices", device])],
  "fleetd policy explain": ["policy", "admin", ({ device, tool, key }) => to(["access", "policy"], { device, tool, key, via: "rest" })],
  "fleetd restart": ["restart", "jobs", ({ device }) => to(["jobs", "new"], { kind: "restart", devices: device })],
  "Restart it.": ["restart", "jobs", ({ device }) => to(["jobs", "new"], { kind: "restart", devices: device })],
  "Is /readyz": ["nodes", "admin", () => to(["nodes"])],
  "Repeat": ["repeat", "tools:call", ({ device, tool }) => tool && to(["devices", device, "tools"], { user: "1", tool })],
  "fleetd devices approve": ["approve", "devices:write"],
};
const LONGEST = Object.keys(STEPS).sort((a, b) => b.length - a.length);

// Step is a button or a link where the console can do it, with what a person has to know beside it.
function Step({ text, about, can, approve }) {
  const start = LONGEST.find((x) => text.startsWith(x)), [name, scope, lead] = STEPS[start] || [], rest = start?.startsWith("fleetd") ? text.split("; ")[1] || "" : start === "Repeat" ? text : "";
  const href = lead?.(about), label = word("step", name);
  if (!name || (lead ? !href : !approve)) return line(start?.startsWith("fleetd") ? label : text, 400);
  if (!can(scope)) return `${label}. ${s.problem.scope(scope)}`;
  return html`${lead ? html`<${Link} class="button small" href=${href}>${label}<//>` : html`<${Act} label=${label} act=${approve} />`} ${rest && line(capital(rest), 400)}`;
}

// Explanation shows what an explain endpoint answers. A node without records answers 404, and nothing is shown. With
// quiet, what is well is not shown either. about is what the steps are for: {device, tool, key}.
export function Explanation({ url, title, watch, quiet, about, can, approve }) {
  const { data, error } = useData((signal) => get(url, signal), [url, watch], { every: EVERY });
  if (error && error.status !== 404 && error.status !== 403) return html`<${Problem} error=${error} />`;
  if (!data || (quiet && data.well)) return null;
  return html`<section class=${data.well ? "card" : "card why"} data-test="explain" aria-label=${title}>
    <p><b>${line(data.sentence, 600)}</b>${!data.certain && html` <small>${s.device.uncertain}</small>`}</p>
    ${data.next.length > 0 && html`<ul class="next">${data.next.map((text, i) => html`<li key=${i}><${Step} text=${text} about=${about} can=${can} approve=${approve} /></li>`)}</ul>`}
    ${data.missing.length > 0 && html`<p class="notice warn">${s.device.silent(line(data.missing.join(", ")))}</p>`}
    <details><summary>${s.device.evidence(data.evidence.length)}</summary><p class="faint"><code>${line(data.cause)}</code></p>
      <ol class="steps">${data.evidence.map((e, i) => html`<li key=${i}><small>${clock(e.at, { ms: true })} · ${line(e.node, 40)} · ${line(e.kind, 40)}</small><span>${line(e.text, 400)}</span></li>`)}</ol></details></section>`;
}

export function Call({ id, can }) {
  const call = useData((signal) => (id ? get(path("v1", "calls", id), signal) : Promise.resolve(null)), [id]);
  const submit = (event) => {
    event.preventDefault();
    go(to(["calls", new FormData(event.target).get("call").trim()]));
  };
  if (!id) {
    return html`<${Page} title=${s.call.open} /><form class="card" onSubmit=${submit}><div class="field"><label for="call">${s.call.lead}</label><input id="call" name="call" required spellcheck=${false} /></div><button class="primary">${s.call.show}</button></form>`;
  }
  const missing = call.error?.status === 404;
  return html`<${Page} title=${call.data?.tool ? s.call.of(call.data.tool) : s.call.title(id)} />
    ${missing ? html`<${Empty}>${s.call.none}<//>` : html`<${Problem} error=${call.error} />`}
    ${!missing && html`<${Explanation} url=${path("v1", "calls", id, "explain")} title=${s.device.explain} about=${call.data || {}} can=${can} />`}
    ${call.data && html`<section class="card"><h2>${s.call.steps}</h2><${Steps} call=${call.data} /></section>`}
    <${Command} cli=${["explain", id]} url=${path("v1", "calls", id, "explain")} />`;
}

// Steps shows what each node recorded of a call.
function Steps({ call }) {
  const w = s.call.step;
  return html`<${Facts} items=${[[w.device, html`<${Link} href=${to(["devices", call.device])}>${line(call.device, 80)}<//>`], [w.tool, line(call.tool, 80)], [w.key, line(call.key, 80)], [s.call.open, html`<code>${line(call.call, 40)}</code>`]]} />
    <ol class="steps">${call.steps.map((step, i) => html`<li key=${i}><small>${clock(step.at, { ms: true })} · ${line(step.node, 40)} · ${step.late ? w.late : step.holder ? w.holder : w.received}</small>
      <span>${line([step.outcome, milliseconds(step.duration_ms), step.waited_ms > 0 && w.waited(milliseconds(step.waited_ms)), step.ahead && w.ahead(step.ahead),
        !step.late && !step.sent && w.unsent, step.rule && w.rule(step.rule), step.detail].filter(Boolean).join(" · "), 400)}</span></li>`)}</ol>`;
}
