// What can a device do? Its tools, a form for each, and what came of calling it.
import { html, useEffect, useMemo, useRef, useState } from "../html.js";
import { get, IMAGES, path, query as encode, request } from "../api.js";
import { useData } from "../data.js";
import { milliseconds, utc } from "../format.js";
import { encodeForm, fields, Fields } from "../form.js";
import { Picture } from "../picture.js";
import { go, Link, setQuery, to } from "../route.js";
import { s } from "../strings.js";
import { Act, Command, Empty, flag, Loaded, Outcome, Problem, Time } from "../ui.js";
import { line, Quoted, Said } from "../untrusted.js";

const KEEP = 10; // calls of a tool that this tab remembers
const LATER = "24h";
const remembered = new Map(); // [{at, values, result}] by device and tool

// covers reports whether a key may call a tool by its name: * in a pattern is anything, ? one character.
export const covers = ({ tools }, name) => !tools?.length || tools.some((pattern) => new RegExp(`^${pattern.replace(/[.+^$\{}()|[\]\\]/g, "\\$&").replace(/\*+/g, ".*").replaceAll("?", ".")}$`, "su").test(name));

export function Tools({ device, query, self, can }) {
  const people = can("tools:call:user") && query.get("user") === "1";
  const tools = useData((signal) => get(path("v1", "devices", device.id, "tools") + encode({ user: people && "true" }), signal), [device.id, people, device.mcp.catalog]);
  const [word, setWord] = useState("");
  const chosen = query.get("tool");
  return html`<${Loaded} from=${tools}>${({ items, state, partial }) => {
    const found = items.filter((t) => covers(self, t.name) && String(t.name).toLowerCase().includes(word.toLowerCase()));
    const tool = chosen !== null && items.find((t) => t.name === chosen);
    return html`
      ${(state === "stale" || device.state !== "online") && html`<p class="notice warn">${s.tools.stale}</p>`}${partial && html`<p class="notice warn">${s.tools.partial}</p>`}
      <div class=${tool ? "tools chosen" : "tools"}>
        <div class="list"><div class="row"><label>${s.tools.search}<input type="search" value=${word} onInput=${(e) => setWord(e.target.value)} /></label></div>
          ${can("tools:call:user") && html`<label class="check"><input type="checkbox" checked=${people} onChange=${(e) => setQuery({ user: e.target.checked ? "1" : "" }, { replace: true })} /> ${s.tools.people}</label>`}
          ${found.length ? html`<ul>${found.map((t, i) => html`<li key=${i}><${Link} href=${to(["devices", device.id, "tools"], { user: people && "1", tool: t.name })} aria-current=${t.name === chosen ? "true" : null}>
            <${Said} text=${t.name} max=${80} />${t.annotations?.audience?.includes("user") && html` <small>${s.tools.user}</small>`}<//></li>`)}</ul>` : html`<${Empty}>${s.tools.empty}<//>`}
          <div class="actions"><${Act} label=${s.tools.refresh} act=${async () => { await request("POST", path("v1", "devices", device.id, "tools", "refresh")); tools.reload(); }} /></div>
        </div>
        <div>${tool ? html`<button type="button" class="link back" onClick=${() => go(to(["devices", device.id, "tools"], { user: people && "1" }))}>${s.tools.back}</button>
          <${Tool} key=${`${device.id} ${tool.name}`} device=${device} tool=${tool} can=${(scope) => can(scope) && (scope !== "tools:call" || covers(self, tool.name))} />` : html`<${Empty}>${chosen ? s.problem.title(404) : s.tools.choose}<//>`}</div>
      </div>`;
  }}<//>`;
}

function Tool({ device, tool, can }) {
  const list = useMemo(() => fields(tool.inputSchema), [tool]);
  const [values, setValues] = useState(() => new Map());
  const [json, setJSON] = useState(list ? null : "{}"); // a text while the arguments are edited as JSON
  const [timeout, setTimeout_] = useState("");
  const [faults, setFaults] = useState(() => new Map());
  const [running, setRunning] = useState(null); // {control, until}
  const [result, setResult] = useState(null); // {answer | error | stopped}
  const memory = `${device.id} ${tool.name}`;
  const busy = useRef(false);
  const shownResult = useRef(null); // below the form, and on a phone below the window
  useEffect(() => { if (result) shownResult.current.scrollIntoView({ block: "nearest" }); }, [result]);
  const url = path("v1", "devices", device.id, "tools", tool.name, "call");

  // read returns the arguments as JSON text, or null after it has shown what is wrong.
  const read = () => {
    if (json === null) {
      const { text, faults: found } = encodeForm(list, values);
      setFaults(found);
      return found.size ? null : text;
    }
    try {
      const value = JSON.parse(json);
      const object = value !== null && typeof value === "object" && !Array.isArray(value);
      setFaults(new Map(object ? [] : [["", s.tools.notObject]]));
      return object ? json : null;
    } catch (error) {
      setFaults(new Map([["", s.tools.invalidJSON(error.message)]]));
      return null;
    }
  };

  const call = async (later) => {
    const text = read();
    if (text === null || busy.current) return;
    busy.current = true;
    const control = new AbortController();
    const at = new Date().toISOString();
    const members = [`"arguments":${text}`];
    if (timeout) members.push(`"timeout":"${Number(timeout)}s"`);
    if (later) members.push(`"later":"${LATER}"`);
    setRunning(control);
    setResult(null);
    let outcome;
    try {
      outcome = { answer: await request("POST", url, { body: `{${members.join(",")}}`, signal: control.signal, what: `${tool.name} · ${device.name || device.id}` }) };
    } catch (error) {
      outcome = error.name === "AbortError" ? { stopped: true } : { error };
      const found = new Map();
      for (const fault of error.problem?.errors || []) found.set(property(fault.pointer, list), fault.detail);
      setFaults(found);
    }
    busy.current = false;
    setRunning(null);
    setResult(outcome);
    remembered.set(memory, [{ at, values, json, ...outcome }, ...(remembered.get(memory) || [])].slice(0, KEEP));
  };
  const submit = (event) => { event.preventDefault(); call(false); };
  const asJSON = () => {
    const { text } = encodeForm(list, values);
    setJSON(JSON.stringify(JSON.parse(text), null, 2));
  };
  const again = (past) => { setValues(past.values); setJSON(past.json); setResult(null); setFaults(new Map()); };
  const shown = json ?? (list && encodeForm(list, values).text);
  return html`<section class="card"><h2><${Said} text=${tool.name} /></h2>
    ${tool.description && html`<${Quoted} pre text=${tool.description} />`}
    <form onSubmit=${submit} noValidate>
      ${faults.has("") && html`<p class="fault" role="alert">${line(faults.get(""), 300)}</p>`}
      ${json === null ? html`<${Fields} list=${list} values=${values} faults=${faults} onChange=${setValues} />`
        : html`<div class="field"><label for="arguments">${s.tools.asJSON}</label><textarea id="arguments" class="mono" rows="6" spellcheck=${false} value=${json} onInput=${(e) => setJSON(e.target.value)}></textarea></div>`}
      <div class="actions">${can("tools:call") ? html`<button class="primary" aria-disabled=${running ? "true" : null}>${s.tools.call}</button>` : html`<p class="faint">${s.tools.denied}</p>`}
        ${list && (json === null ? html`<button type="button" onClick=${asJSON}>${s.tools.asJSON}</button>` : html`<button type="button" onClick=${() => setJSON(null)}>${s.tools.asForm}</button>`)}
        ${can("tools:call") && can("jobs") && device.state !== "online" && html`<button type="button" disabled=${!!running} onClick=${() => call(true)}>${s.tools.later}</button>`}</div>
      <details><summary>${s.tools.timeout}</summary><input type="number" aria-label=${s.tools.timeout} min="1" max="300" value=${timeout} onInput=${(e) => setTimeout_(e.target.value)} /></details>
    </form>
    ${running && html`<${Waiting} control=${running} />`}
    <div role="status" ref=${shownResult}>${result && html`<${Result} ...${result} device=${device} can=${can} />`}</div>
    <${Past} calls=${remembered.get(memory)} onAgain=${again} />
    <${Command} cli=${["call", device.id, tool.name, ...flag("--args", shown !== "{}" && shown)]} method="POST" url=${url} body=${{ arguments: "…" }} />
  </section>`;
}


// property is the name that a JSON pointer of the API leads to, or "" if the form has no field for it.
function property(pointer, list) {
  const name = String(pointer || "").split("/")[1]?.replaceAll("~1", "/").replaceAll("~0", "~");
  return name !== undefined && list?.some((f) => f.name === name) ? name : "";
}

function Waiting({ control }) {
  const [seconds, setSeconds] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => setSeconds((n) => n + 1), 1000);
    return () => clearInterval(timer);
  }, []);
  return html`<p class="notice" role="status">${seconds > 0 && s.tools.calling(seconds)} <button type="button" onClick=${() => control.abort()}>${s.tools.stop}</button></p>`;
}

// Result shows an answer. Neither good nor bad is what is not known.
function Result({ answer, error, stopped, can }) {
  if (stopped) return html`<p class="notice warn"><${Outcome} tone="neutral">${s.tools.stopped}<//></p>`;
  if (error) {
    const unknown = error.problem?.outcome === "unknown";
    return html`<${Problem} error=${error}>${unknown && html`<p><${Outcome} tone="neutral">${s.tools.unknownOutcome}<//></p>`}<//>`;
  }
  if (answer.job) return html`<p class="notice">${s.tools.queued} <${Link} href=${to(["jobs", answer.job])}>${answer.job}<//></p>`;
  const tone = answer.outcome ? "neutral" : answer.isError ? "bad" : "good";
  const word = answer.outcome === "restarting" ? s.tools.restarting : answer.outcome ? s.tools.unknownOutcome : answer.isError ? s.tools.failed : s.tools.ok;
  return html`<section aria-label=${s.tools.result} data-test="result"><p><${Outcome} tone=${tone}>${word}<//> <small>${s.tools.took(milliseconds(answer.duration_ms), line(answer.node, 40))}</small>
      ${answer.call && html` <${Link} href=${to(["calls", answer.call])}>${tone === "good" ? answer.call : s.why}<//>`}</p>
    ${(answer.content || []).map((part, i) => html`<${Content} key=${i} part=${part} can=${can} />`)}
    ${!answer.content?.length && html`<p class="faint">${s.tools.empty_result}</p>`}</section>`;
}

// Content is one part of a result: text, JSON, a photo that the text names, or a picture.
function Content({ part, can }) {
  if (part.type === "image") return html`<${Inline} part=${part} />`;
  if (typeof part.text !== "string") return html`<${Quoted} pre text=${JSON.stringify(part, null, 2)} />`;
  let value;
  try {
    value = JSON.parse(part.text);
  } catch {
    return html`<${Quoted} pre text=${part.text} />`;
  }
  const photo = typeof value?.photo === "string" && /^[a-z0-9]{8,40}$/.test(value.photo) && can("photos:read") && value.photo;
  return html`<${Quoted} pre text=${JSON.stringify(value, null, 2)} />${photo && html`<${Picture} id=${photo} alt=${s.tools.image} />`}`;
}

// Inline is a picture within the answer. A type that is no picture is not shown.
function Inline({ part }) {
  const [url, setURL] = useState("");
  useEffect(() => {
    if (!IMAGES.has(part.mimeType)) return undefined;
    let made = "";
    try {
      made = URL.createObjectURL(new Blob([Uint8Array.from(atob(part.data), (c) => c.charCodeAt(0))], { type: part.mimeType }));
      setURL(made);
    } catch {
      setURL(""); // not base64
    }
    return () => URL.revokeObjectURL(made);
  }, [part]);
  return url ? html`<img class="picture" src=${url} alt=${s.tools.image} />` : html`<${Quoted} text=${String(part.mimeType)} />`;
}

function Past({ calls, onAgain }) {
  if (!calls?.length) return null;
  return html`<details><summary>${s.tools.last} (${calls.length})</summary><ul class="log" key=${utc.get()}>${calls.map((c, i) => html`<li key=${i}><${Time} at=${c.at} exact />
    <span>${c.answer ? html`<${Outcome} tone=${c.answer.outcome || c.answer.job ? "neutral" : c.answer.isError ? "bad" : "good"}>${line(c.answer.content?.[0]?.text ?? "", 80)}<//>`
      : html`<${Outcome} tone=${c.stopped ? "neutral" : "bad"}>${c.stopped ? s.tools.stopped : line(c.error.message, 120)}<//>`}
      ${" "}<button type="button" class="link" onClick=${() => onAgain(c)}>${s.tools.again}</button></span></li>`)}</ul></details>`;
}
