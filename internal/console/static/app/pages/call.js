// Why did a call fail, or why is a device not well? The verdict, its evidence, and what to try.
import { html } from "../html.js";
import { get, path } from "../api.js";
import { useData } from "../data.js";
import { clock, milliseconds } from "../format.js";
import { Link, go, to } from "../route.js";
import { s } from "../strings.js";
import { Command, Empty, Facts, Page, Problem } from "../ui.js";
import { line } from "../untrusted.js";

const EVERY = 5_000; // a cause may appear without an event

// Explanation shows what an explain endpoint answers. A node without records answers 404, and nothing is shown. With
// quiet, what is well is not shown either.
export function Explanation({ url, title, watch, quiet }) {
  const { data, error } = useData((signal) => get(url, signal), [url, watch], { every: EVERY });
  if (error && error.status !== 404 && error.status !== 403) return html`<${Problem} error=${error} />`;
  if (!data || (quiet && data.well)) return null;
  return html`<section class="card" data-test="explain"><h2>${title}</h2>
    <p><strong>${line(data.sentence, 600)}</strong></p>
    <p class="faint"><code>${line(data.cause)}</code> (${data.certain ? s.device.certain : s.device.uncertain})</p>
    ${data.evidence.length > 0 && html`<h3>${s.device.evidence}</h3><ol class="steps">${data.evidence.map((e, i) => html`<li key=${i}><small>${clock(e.at, { ms: true })} · ${line(e.node, 40)} · ${line(e.kind, 40)}</small><span>${line(e.text, 400)}</span></li>`)}</ol>`}
    ${data.next.length > 0 && html`<h3>${s.device.next}</h3><ol>${data.next.map((text, i) => html`<li key=${i}>${line(text, 400)}</li>`)}</ol>`}
    ${data.missing.length > 0 && html`<p class="notice warn">${s.device.silent(line(data.missing.join(", ")))}</p>`}</section>`;
}

export function Call({ id }) {
  const call = useData((signal) => (id ? get(path("v1", "calls", id), signal) : Promise.resolve(null)), [id]);
  const submit = (event) => {
    event.preventDefault();
    go(to(["calls", new FormData(event.target).get("call").trim()]));
  };
  if (!id) {
    return html`<${Page} title=${s.call.open} /><form class="card" onSubmit=${submit}><div class="field"><label for="call">${s.call.lead}</label><input id="call" name="call" required spellcheck=${false} /></div><button class="primary">${s.call.show}</button></form>`;
  }
  const missing = call.error?.status === 404;
  return html`<${Page} title=${s.call.title(id)} />
    ${missing ? html`<${Empty}>${s.call.none}<//>` : html`<${Problem} error=${call.error} />`}
    ${!missing && html`<${Explanation} url=${path("v1", "calls", id, "explain")} title=${s.device.explain} />`}
    ${call.data && html`<section class="card"><h2>${s.call.steps}</h2><${Steps} call=${call.data} /></section>`}
    <${Command} cli=${["explain", id]} url=${path("v1", "calls", id, "explain")} />`;
}

// Steps shows what each node recorded of a call.
function Steps({ call }) {
  const w = s.call.step;
  return html`<${Facts} items=${[[w.device, html`<${Link} href=${to(["devices", call.device])}>${line(call.device, 80)}<//>`], [w.tool, line(call.tool, 80)], [w.key, line(call.key, 80)]]} />
    <ol class="steps">${call.steps.map((step, i) => html`<li key=${i}><small>${clock(step.at, { ms: true })} · ${line(step.node, 40)} · ${step.late ? w.late : step.holder ? w.holder : w.received}</small>
      <span>${line([step.outcome, milliseconds(step.duration_ms), step.waited_ms > 0 && w.waited(milliseconds(step.waited_ms)), step.ahead && w.ahead(step.ahead),
        !step.late && !step.sent && w.unsent, step.rule && w.rule(step.rule), step.detail].filter(Boolean).join(" · "), 400)}</span></li>`)}</ol>`;
}
