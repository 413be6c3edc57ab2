// Controls without a form, for tools that set one thing: a slider, a choice, a photo. A control calls when it is released; it has one
// call in flight, after which it sends the last value alone; it shows what the device answered. Nothing is read until somebody asks.
import { html, useRef, useState } from "../html.js";
import { get, path, request } from "../api.js";
import { useData } from "../data.js";
import { fields } from "../form.js";
import { clock } from "../format.js";
import { Link, to } from "../route.js";
import { s } from "../strings.js";
import { Act, Outcome, Panel, Problem } from "../ui.js";
import { line } from "../untrusted.js";
import { covers } from "./tools.js";

const STATUS = "self.get_device_status", PHOTO = /(^|\.)take_photo$/;
const THEMES = ["light", "dark"]; // what the firmware has (mcp_server.cc); the schema of the tool names none
const MOST = 8;

// settings are the tools that set one bounded number or the theme: [{tool, field, label, values}].
function settings(tools) {
  const found = [];
  for (const tool of tools) {
    const list = fields(tool.inputSchema), label = /(?:^|\.)set_(\w+)$/.exec(tool.name)?.[1];
    if (!label || list?.length !== 1 || tool.annotations?.audience?.includes("user")) continue;
    const [field] = list;
    if (field.type === "integer" && Number.isFinite(field.min) && field.max > field.min) found.push({ tool, field, label });
    else if (label === "theme" && field.type === "string") found.push({ tool, field, label, values: THEMES });
    else if (field.type === "boolean") found.push({ tool, field, label, values: [true, false] });
  }
  return found.slice(0, MOST);
}

// shownIn is the value of a setting in the device's status, whichever part of it has the name.
function shownIn(status, name) {
  for (const part of Object.values(status || {})) if (part && typeof part === "object" && Object.hasOwn(part, name)) return part[name];
}

export function Controls({ device: d, self, can }) {
  const tools = useData((signal) => get(path("v1", "devices", d.id, "tools"), signal), [d.id, d.mcp.catalog]);
  const [status, setStatus] = useState(null);
  const items = (tools.data?.items || []).filter((t) => covers(self, t.name));
  const list = settings(items), photo = items.find((t) => PHOTO.test(t.name));
  if (!list.length && !photo) return null;
  const call = (tool, args) => request("POST", path("v1", "devices", d.id, "tools", tool, "call"), { body: { arguments: args }, what: `${tool} · ${d.name || d.id}` });
  const off = d.state !== "online" ? s.controls.offline : !can("tools:call") ? s.controls.denied : "";
  const read = async () => setStatus(JSON.parse((await call(STATUS, {})).content[0].text));
  return html`<${Panel} title=${s.controls.title} more=${to(["devices", d.id, "tools"])}><div class="controls">
    ${list.map((x) => html`<${Control} key=${x.tool.name} ...${x} call=${call} off=${off} known=${shownIn(status, x.label)} />`)}
    <div class="actions">${items.some((t) => t.name === STATUS) && list.length > 0 && html`<${Act} label=${s.controls.read} disabled=${!!off} act=${read} />`}
      ${photo && html`<${Act} label=${s.controls.photo} disabled=${!!off} act=${() => call(photo.name, { question: s.controls.question })} />`}</div>
    ${off && html`<p class="faint">${off}</p>`}</div><//>`;
}

function Control({ tool, field, label, values, call, off, known }) {
  const [value, setValue] = useState(null); // what the person chose
  const [answer, setAnswer] = useState(null); // {at, value, result | error}
  const flight = useRef({ busy: false, next: undefined });
  const name = label.replaceAll("_", " ");
  const shown = value ?? known;
  const set = async (chosen) => {
    setValue(chosen);
    if (flight.current.busy) {
      flight.current.next = chosen;
      return;
    }
    flight.current.busy = true;
    for (let now = chosen; now !== undefined; now = flight.current.next) {
      flight.current.next = undefined;
      try {
        setAnswer({ at: new Date(), value: now, result: await call(tool.name, { [field.name]: now }) });
      } catch (error) {
        setAnswer({ at: new Date(), value: now, error });
        setValue(null);
      }
    }
    flight.current.busy = false;
  };
  const { result, error } = answer || {};
  return html`<div class="control"><span id=${"c-" + tool.name}>${line(name, 40)}</span>
    ${values ? html`<span role="group" aria-labelledby=${"c-" + tool.name}>${values.map((v) => html`<button type="button" key=${v} class="chip" disabled=${!!off} aria-pressed=${shown === v ? "true" : "false"} onClick=${() => set(v)}>${s.controls.values[v] || v}</button> `)}</span>`
      : html`<input type="range" aria-labelledby=${"c-" + tool.name} min=${field.min} max=${field.max} value=${shown ?? field.min} disabled=${!!off} onInput=${(e) => setValue(Number(e.target.value))} onChange=${(e) => set(Number(e.target.value))} />`}
    <span class="num">${values ? "" : shown ?? "–"}</span></div>
    ${answer && html`<div class="faint" role="status">${error ? html`<${Problem} error=${error} />`
      : html`<${Outcome} tone=${result.isError ? "bad" : "good"}>${s.controls.answered(clock(answer.at.toISOString(), { date: false }), name, s.controls.values[answer.value] || answer.value, line(result.content?.[0]?.text ?? "", 120))}<//>
        ${result.call && html` <${Link} href=${to(["calls", result.call])}>${s.controls.call}<//>`}`}</div>`}`;
}
