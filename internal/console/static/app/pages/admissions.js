// Which devices wait to become members, and which ids do two clients use?
import { html, useState } from "../html.js";
import { get, path, query as encode, request } from "../api.js";
import { useActed, useData, useEvents } from "../data.js";
import { Link, setQuery, to } from "../route.js";
import { s, word } from "../strings.js";
import { Command, Loaded, Page, Pager, Panel, Problem, Time } from "../ui.js";
import { line, Said } from "../untrusted.js";
import { Clients, isClaimed } from "./waiting.js";

const EVERY = 10_000; // codes appear without an event

const a = s.admissions;

export function Admissions({ query, can }) {
  const cursor = query.get("cursor") || "";
  const waiting = useData((signal) => get("/v1/devices" + encode({ select: "state in (pending,contested)", limit: 100, cursor }), signal), [cursor], { every: EVERY });
  const strangers = useData((signal) => get("/v1/refusals", signal), [], { every: EVERY });
  useEvents((message) => message.events?.some((e) => e.type === "pending" || e.type === "contested") && waiting.soon());
  useActed(waiting.soon);
  const list = (items, none) => (items.length ? items.map((d) => html`<section class="who" key=${d.id}><h3><${Link} href=${to(["devices", d.id])}><${Said} text=${d.name || d.id} max=${48} /><//>${" "}
      <small>${[d.name && d.id, d.board, d.firmware].filter(Boolean).map((x) => line(x, 40)).join(" · ")}</small></h3><${Clients} device=${d} can=${can} done=${waiting.reload} /></section>`) : html`<p class="blank">${none}</p>`);
  return html`<${Page} title=${a.title} />
    <${Loaded} from=${waiting}>${({ items }) => html`
      ${items.some(isClaimed) && html`<${Panel} title=${a.clones} data-test="clones">${list(items.filter(isClaimed))}<//>`}
      <${Panel} title=${a.waiting}>${list(items.filter((d) => !isClaimed(d)), a.none)}<//>`}<//>
    <${Pager} next=${waiting.data?.next_cursor} cursor=${cursor} onCursor=${(c) => setQuery({ cursor: c })} />
    <${Code} onApproved=${waiting.reload} />
    ${strangers.data && html`<${Panel} title=${a.strangers}>${strangers.data.items?.length ? html`<ol class="log">${strangers.data.items.map((r, i) => html`<li key=${i}><span><${Time} at=${r.at} /></span>
      <span>${r.device && html`<${Link} href=${to(["devices", r.device])}><bdi>${line(r.device, 80)}</bdi><//> `}${line(word("record", r.kind, r), 200)} <small>${line([r.address, r.count > 1 && s.times(r.count)].filter(Boolean).join(" "), 80)}</small></span></li>`)}</ol>` : html`<p class="blank">${a.noStrangers}</p>`}<//>`}
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
