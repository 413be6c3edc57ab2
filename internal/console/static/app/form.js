// Forms from the schemas of tools. Firmware has three types: boolean, integer, string. Everything else is JSON.
// Values are kept in a Map, because a device may call a property __proto__.
import { html, useState } from "./html.js";
import { s } from "./strings.js";
import { line, Said } from "./untrusted.js";

const RANGE = 1000; // integers up to this span also get a slider
const LONG = 80; // strings past this get several lines

// fields reads the properties of a schema: an array of {name, type, required, fallback, min, max}, or null if it has
// what the form cannot show.
export function fields(schema) {
  const properties = schema?.properties ?? {};
  if (schema?.type !== "object" || typeof properties !== "object" || Array.isArray(properties)) return null;
  const required = new Set(Array.isArray(schema.required) ? schema.required : []);
  const found = [];
  for (const [name, property] of Object.entries(properties)) {
    if (!["boolean", "integer", "string"].includes(property?.type) || property.enum) return null;
    found.push({ name, type: property.type, required: required.has(name), fallback: property.default, min: property.minimum, max: property.maximum });
  }
  return found;
}

// encodeForm writes arguments as JSON text, so that no name becomes a property of an object of ours, and an integer past
// 2^53 is sent as it was typed. faults is a Map from name to a sentence.
export function encodeForm(list, values) {
  const faults = new Map();
  const members = [];
  for (const field of list) {
    const value = values.get(field.name);
    const json = encodeValue(field, value);
    if (json === null) {
      if (field.required) faults.set(field.name, field.type === "boolean" ? s.tools.choice : field.type === "integer" ? s.tools.number : s.tools.required);
    } else if (json === false) faults.set(field.name, s.tools.number);
    else members.push(`${JSON.stringify(field.name)}:${json}`);
  }
  return { text: `{${members.join(",")}}`, faults };
}

// encodeValue returns JSON, null to leave the property out, or false for what is not valid.
function encodeValue(field, value) {
  if (value === undefined) return null;
  if (field.type === "boolean") return value === "" ? null : value;
  if (field.type === "string") return JSON.stringify(value);
  const text = value.trim();
  if (text === "") return null;
  return /^-?\d+$/.test(text) ? text.replace(/^(-?)0+(?=\d)/, "$1") : false;
}

// Fields shows one control for each property. faults (a Map) are shown at their field. onChange receives a function
// from the values before to those after.
export function Fields({ list, values, faults, onChange }) {
  if (!list.length) return html`<p class="faint">${s.tools.noArguments}</p>`;
  const set = (name) => (value) => onChange((before) => {
    const next = new Map(before);
    value === undefined ? next.delete(name) : next.set(name, value);
    return next;
  });
  return list.map((field, i) => html`<${Field} key=${i} id=${`field-${i}`} field=${field} value=${values.get(field.name)} fault=${faults.get(field.name)} onChange=${set(field.name)} />`);
}

function Field({ id, field, value, fault, onChange }) {
  const name = html`<${Said} text=${field.name || "\"\""} max=${60} />`;
  const common = { id, "aria-describedby": fault ? `${id}-fault` : null, "aria-invalid": fault ? "true" : null };
  const { type, required, fallback, min, max } = field;
  let control;
  if (type === "boolean" && required) {
    control = html`<fieldset aria-describedby=${common["aria-describedby"]}><legend>${name}</legend>${["true", "false"].map((v) => html`<label class="check" key=${v}>
      <input type="radio" name=${id} checked=${value === v} onChange=${() => onChange(v)} /> ${v === "true" ? s.tools.on : s.tools.off}</label>`)}</fieldset>`;
  } else if (type === "boolean") {
    control = html`<label for=${id}>${name}</label><select ...${common} value=${value ?? ""} onChange=${(e) => onChange(e.target.value || undefined)}>
      <option value="">${s.tools.useDefault(fallback ? s.tools.on : s.tools.off)}</option><option value="true">${s.tools.on}</option><option value="false">${s.tools.off}</option></select>`;
  } else if (type === "integer") {
    const bounded = Number.isSafeInteger(min) && Number.isSafeInteger(max);
    const hint = bounded ? s.tools.range(min, max) : "";
    control = html`<label for=${id}>${name} <small>${hint}</small></label><div class="number">
      <input ...${common} type="text" inputmode="numeric" autocomplete="off" value=${value ?? ""} placeholder=${fallback === undefined ? "" : line(fallback, 40)}
        onInput=${(e) => onChange(e.target.value || undefined)} />
      ${bounded && max - min <= RANGE && max > min && html`<input type="range" min=${min} max=${max} step="1" aria-label=${line(field.name, 60)} value=${value ?? fallback ?? min}
        onInput=${(e) => onChange(e.target.value)} />`}</div>`;
  } else {
    control = html`<${Text} ...${{ id, common, name, value, required, fallback, onChange }} />`;
  }
  return html`<div class="field">${control}${fault && html`<p class="fault" id=${`${id}-fault`}>${line(fault, 300)}</p>`}</div>`;
}

// Text tells an empty string, which is sent, from one that is left out.
function Text({ id, common, name, value, required, fallback, onChange }) {
  const [long, setLong] = useState(false);
  const several = long || (value ?? "").length > LONG || /\n/.test(value ?? "");
  const attributes = { ...common, autocomplete: "off", value: value ?? "", placeholder: fallback === undefined ? "" : line(fallback, 80), onInput: (e) => {
    if (/\n/.test(e.target.value) || e.target.value.length > LONG) setLong(true);
    onChange(e.target.value === "" && !required && value === undefined ? undefined : e.target.value);
  } };
  const onPaste = (e) => {
    const pasted = e.clipboardData?.getData("text") ?? "";
    if (!pasted.includes("\n")) return; // an input of one line would drop the line breaks
    e.preventDefault();
    setLong(true);
    onChange((value ?? "") + pasted);
  };
  return html`<label for=${id}>${name}</label>
    ${several ? html`<textarea rows="5" ...${attributes}></textarea>` : html`<input type="text" ...${attributes} onPaste=${onPaste} />`}
    ${!required && html`<label class="check"><input type="checkbox" checked=${value !== undefined} onChange=${(e) => onChange(e.target.checked ? value ?? "" : undefined)} /> ${s.tools.send}</label>`}`;
}
