// Which devices wait to become members?
import { html, useState } from "../html.js";
import { get, path, query as encode, request } from "../api.js";
import { useData, useEvents } from "../data.js";
import { clock } from "../format.js";
import { Link, to } from "../route.js";
import { s } from "../strings.js";
import { Command, Empty, Loaded, Page, Problem, Rows, Time } from "../ui.js";
import { line, Said } from "../untrusted.js";
import { Waiting } from "./waiting.js";

const EVERY = 10_000; // codes appear without an event

export function Admissions({ query, can }) {
  const waiting = useData((signal) => get("/v1/devices" + encode({ state: "pending", limit: 100, cursor: query.get("cursor") }), signal), [query.get("cursor")], { every: EVERY });
  const strangers = useData((signal) => get("/v1/refusals", signal), [], { every: EVERY });
  useEvents((message) => message.events?.some((e) => e.type === "pending") && waiting.soon());
  return html`<${Page} title=${s.admissions.title} />
    <${Code} onApproved=${waiting.reload} />
    <section><h2>${s.admissions.waiting}</h2><${Loaded} from=${waiting}>${({ items }) => (items.length ? html`<${Rows} columns=${s.admissions.columns}>${items.flatMap((d) => d.pending.map((w) => html`<tr key=${d.id + w.client}>
      <td class="first"><${Link} href=${to(["devices", d.id])}><${Said} text=${d.name || d.id} max=${48} /><//></td>
      <td><${Said} text=${d.board} max=${40} /></td><td><${Said} text=${d.firmware} max=${24} /></td><td><${Time} at=${w.since} /></td>
      <td><${Waiting} device=${d} ...${w} can=${can} done=${waiting.reload} /></td></tr>`))}<//>` : html`<${Empty}>${s.admissions.none}<//>`)}<//></section>
    ${strangers.data && html`<section><h2>${s.admissions.strangers}</h2>${strangers.data.items?.length ? html`<ol class="log">${strangers.data.items.map((r, i) => html`<li key=${i}><span>${clock(r.at)}</span>
      <span>${r.device && html`<${Link} href=${to(["devices", r.device])}><bdi>${line(r.device, 80)}</bdi><//>`} ${line([r.cause || r.kind, r.text, r.address, r.count > 1 && s.times(r.count)].filter(Boolean).join(" · "), 240)}</span></li>`)}</ol>` : html`<${Empty}>${s.admissions.noStrangers}<//>`}</section>`}
    <${Command} cli=${["devices", "approve", "CODE"]} method="POST" url="/v1/devices/CODE/approve" />`;
}

// Code approves by what the device speaks. Spaces that came with pasting are dropped.
function Code({ onApproved }) {
  const [code, setCode] = useState("");
  const [message, setMessage] = useState("");
  const [error, setError] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    setError(null);
    const digits = code.replace(/\s|-/g, "");
    if (!/^\d{6}$/.test(digits)) {
      setMessage(s.admissions.codeWrong);
      return;
    }
    setMessage("");
    try {
      const device = await request("POST", path("v1", "devices", digits, "approve"));
      setMessage(s.admissions.approved(device.id));
      setCode("");
      onApproved();
    } catch (problem) {
      setError(problem);
    }
  };
  return html`<form class="card" onSubmit=${submit}><div class="field"><label for="code">${s.admissions.code} <small>(${s.admissions.codeHint})</small></label>
    <input id="code" inputmode="numeric" autocomplete="one-time-code" value=${code} onInput=${(e) => setCode(e.target.value)} /></div>
    <button class="primary">${s.device.approve}</button><p role="status">${message}</p><${Problem} error=${error} /></form>`;
}
