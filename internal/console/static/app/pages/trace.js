// What do a device and its node say to each other? Messages, records and calls as they come, for as long as this page is open.
import { html, useEffect, useReducer, useRef, useState } from "../html.js";
import { now, path, request, save, send } from "../api.js";
import { useFeed } from "../data.js";
import { bytes, clock } from "../format.js";
import { Link, to } from "../route.js";
import { s } from "../strings.js";
import { FIRST_RETRY, longer, parse, sleep, spread } from "../stream.js";
import { Command, Empty, Pause, Problem } from "../ui.js";
import { line, Quoted } from "../untrusted.js";

const KEEP = 1000, SHOWN = 250;
const DRAW = 250; // a trace has up to 200 entries a second, which are drawn together
const TIMES = ["1m", "10m", "1h", "6h", "24h"];

export function Trace({ device, can }) {
  const url = path("v1", "devices", device.id, "trace");
  const [rows, setRows] = useState([]);
  const [running, setRunning] = useState(null); // {expires_at, payload, missing, ended} of the trace that this page reads or read
  const [lost, setLost] = useState(false);
  const [error, setError] = useState(null);
  const [form, setForm] = useState({ lasts: "10m", payload: false });
  const reading = useRef(null);
  const serial = useRef(0), waiting = useRef([]), drawing = useRef(0);
  const [, redraw] = useReducer((n) => n + 1, 0);
  const feed = useFeed({ patch: setRows, soon: redraw, reload: redraw }, KEEP);
  const latest = useRef(feed);
  latest.current = feed;

  const draw = () => {
    drawing.current = 0;
    latest.current.add(waiting.current.reverse());
    waiting.current = [];
  };
  const add = (entry) => {
    waiting.current.push({ ...entry, key: ++serial.current });
    if (waiting.current.length > KEEP) waiting.current.shift();
    drawing.current ||= setTimeout(draw, DRAW);
  };
  const leave = () => {
    reading.current?.abort();
    reading.current = null;
  };
  useEffect(() => () => {
    leave();
    clearTimeout(drawing.current);
  }, []);

  // read follows the trace until it ends, also over another connection. What happened between two of them is missing.
  const read = async (known) => {
    leave();
    const control = reading.current = new AbortController();
    const { signal } = control;
    let begun = known, delay = FIRST_RETRY;
    if (known) setRunning(known);
    while (!signal.aborted) {
      try {
        const response = await send("GET", url, { signal });
        setLost(false);
        setRunning((r) => (begun ? r : {}));
        if (delay > FIRST_RETRY) add({ kind: "gap", at: new Date(now()).toISOString() });
        begun = true;
        delay = FIRST_RETRY;
        for await (const event of parse(response.body)) {
          if (event.type === "end") {
            setRunning((r) => ({ ...r, ended: true }));
            return;
          }
          add(event.data);
        }
      } catch (problem) {
        if (signal.aborted) return;
        if (problem.status === 404 && begun) { // it ended while this page was not connected
          setRunning((r) => ({ ...r, ended: true }));
          setLost(false);
          return;
        }
        if (problem.status && problem.status !== 503) {
          setRunning(null);
          throw problem;
        }
      }
      if (signal.aborted) return;
      setLost(true);
      await sleep(spread(delay), signal);
      delay = longer(delay);
    }
  };
  const follow = (known) => {
    setError(null);
    return read(known).catch(setError);
  };
  const active = running && !running.ended;
  // The button that begins a trace ends it, too, so that it keeps the focus.
  const submit = async (event) => {
    event.preventDefault();
    setError(null);
    leave();
    try {
      if (active) {
        setRunning({ ...running, ended: true });
        await request("DELETE", url);
      } else {
        follow(await request("POST", url, { body: { for: form.lasts, payload: form.payload } }));
      }
    } catch (problem) {
      if (!active || problem.status !== 404) setError(problem); // it had ended
    }
  };
  return html`${!running && html`<p>${s.trace.lead}</p>`}
    <form class="card" onSubmit=${submit}><div class="row">${!active && html`<label>${s.trace.lasts}<select value=${form.lasts} onChange=${(e) => setForm({ ...form, lasts: e.target.value })}>${TIMES.map((t) => html`<option key=${t}>${t}</option>`)}</select></label>`}
        <button class=${active ? "" : "primary"}>${active ? s.trace.end : s.trace.start}</button>${!active && html`<button type="button" onClick=${() => follow(null)}>${s.trace.join}</button>`}</div>
      ${!active && can("admin") && html`<label class="check"><input type="checkbox" checked=${form.payload} aria-describedby="payload-means" onChange=${(e) => setForm({ ...form, payload: e.target.checked })} /> ${s.trace.payload}</label><p class="faint" id="payload-means">${s.trace.payloadMeans}</p>`}</form>
    <p class=${running ? "notice" : ""} role="status" data-test="state">${running && (running.ended ? s.trace.ended : lost ? s.trace.lost : s.trace.running)} ${active && running.expires_at && s.trace.until(clock(running.expires_at, { date: false }))}</p>
    ${active && running.missing?.length > 0 && html`<p class="notice warn">${s.trace.missing(line(running.missing.join(", "), 200))}</p>`}
    <${Problem} error=${error} />
    ${(active || rows.length > 0) && html`<div class="actions"><${Pause} feed=${feed} /><button type="button" disabled=${!rows.length} onClick=${() => save(new Blob([JSON.stringify(rows.map(({ key, ...entry }) => entry), null, 2)], { type: "application/json" }), `trace-${device.id.replaceAll(":", "")}.json`)}>${s.timeline.download}</button></div>`}
    ${rows.length > 0 ? html`<ol class="log" data-test="trace">${rows.slice(0, SHOWN).map((e) => html`<${Entry} key=${e.key} entry=${e} />`)}</ol>` : active && html`<${Empty}>${s.trace.empty}<//>`}
    <${Command} cli=${["trace", device.id, "--for", form.lasts, ...(form.payload ? ["--payload"] : [])]} method="POST" url=${url} body=${{ for: form.lasts, payload: form.payload }} />`;
}

const Entry = ({ entry: e }) => html`<li><time datetime=${e.at} title=${e.at}>${clock(e.at, { ms: true })}</time>
  <div><small>${s.trace.kinds[e.kind] || line(e.kind, 20)}</small> ${line([e.type, e.method, e.cause, e.text, e.rpc && `id=${e.rpc}`, e.bytes > 0 && bytes(e.bytes)].filter(Boolean).join(" · "), 300)}
    ${e.call && html` <${Link} href=${to(["calls", e.call])}>${s.why}<//>`}${e.dropped > 0 && html` <small>${s.trace.dropped(e.dropped)}</small>`}
    ${e.payload && html`<${Quoted} pre from=${s.trace.kinds[e.kind]} text=${e.payload} />`}</div></li>`;
