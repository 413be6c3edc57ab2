// The search: words and selections in one text, as people type it, and how it was read, in words.
import { term } from "./format.js";
import { s, word } from "./strings.js";

// PART is a term of a selection, a text in quotes, or a word.
const PART = /[\s,]*(?:!([\w.-]+)|([\w.-]+)\s*(?:\s(not\s+)?in\s*\(([^)]*)\)|(!=|[<>]?=|<|>)\s*("(?:[^"\\]|\\.)*"|[^\s,]*))|"((?:[^"\\]|\\.)*)"|([^\s,]+))/gy;

const unquoted = (text) => text.trim().replace(/^"(.*)"$/s, (_, inner) => inner.replace(/\\(.)/gs, "$1"));

// read returns the words of a text and its terms, each as it is written and in words. A selection has names in place of words.
function read(text) {
  const words = [], terms = [];
  for (const [whole, lacking, name, not, list, operator, value, quoted, single] of text.matchAll(PART)) {
    if (!lacking && !name) words.push(quoted ?? single);
    else terms.push([whole.replace(/^[\s,]+/, ""), lacking ? s.search.lacks(field(lacking)) : inWords(name, not ? "!=" : operator || "=", (list?.split(",") || [value]).map(unquoted))]);
  }
  return { words, terms };
}

const field = (name) => (Object.hasOwn(s.search.fields, name) ? s.search.fields[name] : s.search.label_(name.replace(/^label\./, "")));

function inWords(name, operator, texts) {
  const values = texts.map((v) => (name === "state" || name === "reason" ? word(name, v) : v) || "\"\"");
  if (name === "seen") return s.search.seen(operator === ">", values[0]);
  return `${field(name)} ${s.search.operators[operator]} ${values.join(s.search.or)}`;
}

// readSearch returns the words that are searched, and the terms of a selection, of a text that a person wrote.
export const readSearch = (text) => {
  const { words, terms } = read(text);
  return { words: words.join(" "), terms: terms.map(([written]) => written) };
};

// FILTERS are the parameters of a URL that choose devices; those of FIELDS are also fields of selections.
const FIELDS = ["state", "reason", "board", "firmware", "transport", "node"];
export const FILTERS = [...FIELDS, "label", "q", "select"];

// selection writes the filters of a URL, without some of them, as one selector.
export function selection(query, without = []) {
  const terms = FIELDS.filter((name) => !without.includes(name) && query.get(name)).map((name) => term(name, query.get(name)));
  const label = query.get("label"), at = label?.indexOf("=");
  if (label) terms.push(at < 0 ? label : term(label.slice(0, at), label.slice(at + 1)));
  if (query.get("select")) terms.push(query.get("select"));
  return [...terms, ...readSearch(query.get("q") || "").terms].join(",");
}

// searched says what is searched: lamp in id, name or board, and label room is hall.
export function searched(words, select) {
  const { words: names, terms } = read(select);
  return [...(words ? [s.search.words(words)] : []), ...terms.map(([, text]) => text), ...names.map((name) => s.search.has(field(name)))].join(s.search.and);
}
