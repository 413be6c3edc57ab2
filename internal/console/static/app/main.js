// The frame of the console: login, navigation, dialogs that requests ask for, and the choice of the page.
import { html, render, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import * as api from "./api.js";
import { Login, Confirmation } from "./session.js";
import { until, utc } from "./format.js";
import { Link, go, ROOT, to, useRoute } from "./route.js";
import { s } from "./strings.js";
import * as stream from "./stream.js";
import { COUNTED, KEY_CHANGED, useActed, useData, useEvents, useStreamState, useTick } from "./data.js";
import { Denied, Empty, Page } from "./ui.js";
import { line } from "./untrusted.js";
import { Overview } from "./pages/overview.js";
import { Devices } from "./pages/devices.js";
import { Device } from "./pages/device.js";
import { Admissions } from "./pages/admissions.js";
import { Jobs, Job, waits } from "./pages/jobs.js";
import { NewJob } from "./pages/newjob.js";
import { Events } from "./pages/events.js";
import { Audit } from "./pages/audit.js";
import { Access, Allow } from "./pages/access.js";
import { Nodes, Doctor } from "./pages/nodes.js";
import { Stats } from "./pages/stats.js";
import { Call } from "./pages/call.js";
import { Webhooks } from "./pages/webhooks.js";
import { Firmware } from "./pages/firmware.js";
import { Roll } from "./pages/roll.js";

// GROUPS are the navigation: pages with their paths and the scopes that they need.
const GROUPS = [
  ["", [["overview", [], "devices:read"], ["devices", ["devices"], "devices:read"], ["jobs", ["jobs"], "jobs:read"], ["firmware", ["firmware"], "firmware:read"]]],
  ["history", [["events", ["events"], "events:read"], ["audit", ["audit"], "admin"], ["stats", ["stats"], "devices:read"]]],
  ["access", [["admissions", ["admissions"], "devices:write"], ["access", ["access"], "admin"], ["webhooks", ["webhooks"], "webhooks"]]],
  ["system", [["nodes", ["nodes"], "admin"], ["doctor", ["doctor"], "admin"]]],
];
const PAGES = GROUPS.flatMap(([, pages]) => pages);
const BAR = new Set(["overview", "devices", "jobs", "events"]); // of a phone, beside "more"

// allows reports whether a key has a scope; the API decides, this only hides.
export const allows = (self, scope) => self.admin || self.scopes.includes(scope) ||
  (scope === "tools:call" && self.scopes.includes("tools:call:user")) || (scope === "jobs:read" && self.scopes.includes("jobs")) || (scope === "firmware:read" && self.scopes.includes("firmware"));

function choose({ segments: [page, ...rest], query }, self, needs) {
  const common = { query, self, needs, can: (scope) => allows(self, scope) };
  const [name, , scope] = PAGES.find(([, segments]) => segments[0] === page) || [];
  if (scope && !allows(self, scope)) return html`<${Page} title=${s.pages[name]} /><${Denied} scope=${scope} />`;
  switch (page) {
    case undefined: return html`<${Overview} ...${common} />`;
    case "devices": return rest.length ? html`<${Device} key=${rest[0]} id=${rest[0]} tab=${rest[1] || ""} ...${common} />` : html`<${Devices} ...${common} />`;
    case "admissions": return html`<${Admissions} ...${common} />`;
    case "jobs":
      if (rest[0] === "new") return html`<${NewJob} ...${common} />`;
      return rest.length ? html`<${Job} key=${rest[0]} id=${rest[0]} ...${common} />` : html`<${Jobs} ...${common} />`;
    case "events": return html`<${Events} ...${common} />`;
    case "audit": return html`<${Audit} ...${common} />`;
    case "keys": case "policy": case "explain": case "access": return html`<${Access} tab=${["policy", "explain"].includes(rest[0] || page) ? "policy" : ""} ...${common} />`;
    case "nodes": return html`<${Nodes} ...${common} />`;
    case "doctor": return html`<${Doctor} ...${common} />`;
    case "firmware": return rest[0] === "roll" ? html`<${Roll} ...${common} />` : html`<${Firmware} ...${common} />`;
    case "webhooks": return html`<${Webhooks} ...${common} />`;
    case "stats": return html`<${Stats} ...${common} />`;
    case "calls": return html`<${Call} key=${rest[0]} id=${rest[0] || ""} ...${common} />`;
  }
  return html`<${Page} title=${s.problem.title(404)}><${Empty}>${s.session.missing(line(location.pathname))} <${Link} href=${to(["devices"])}>${s.session.missingNext}<//><//><//>`;
}

// useNeeds reads what the navigation and several pages show: the counts of all devices, the jobs that wait for a person, and those that
// roll out firmware.
function useNeeds(self) {
  const whole = Object.keys(self.devices || {}).length === 0;
  const fleet = useData((signal) => (allows(self, "devices:read") ? api.get("/v1/fleet", signal) : null), [self], { every: 60_000, settle: whole ? undefined : COUNTED });
  const jobs = useData(async (signal) => {
    if (!allows(self, "jobs:read")) return [];
    const lists = await Promise.all(["halted", "running"].map((state) => api.get("/v1/jobs" + api.query({ state, limit: 200 }), signal)));
    return lists.flatMap((list) => list.items).filter((job) => waits(job) || job.spec.action.firmware);
  }, [self], { every: 30_000 });
  useEvents((message) => {
    if (message.gap || message.events?.some((e) => e.type === "pending")) fleet.soon();
    if (message.gap || message.events?.some((e) => e.type.startsWith("job.") && e.type !== "job.phase")) jobs.soon();
  });
  useActed(() => { fleet.soon(); jobs.soon(); });
  return { fleet, jobs };
}

// Count is a number of what waits for a person, or nothing.
const Count = ({ n }) => n > 0 && html`<span class="count">${n}<span class="away"> ${s.pages.need}</span></span>`;

function Navigation({ self, page, needs }) {
  const [more, setMore] = useState(false);
  const counts = { jobs: needs.jobs.data?.filter(waits).length, admissions: needs.fleet.data?.state.pending };
  const further = PAGES.filter(([name, , scope]) => !BAR.has(name) && allows(self, scope));
  return html`<nav class=${more ? "main open" : "main"} aria-label="fleetd">
    <${Link} class="brand" href=${ROOT}>fleetd<//>
    ${GROUPS.map(([group, pages]) => {
      const shown = pages.filter(([, , scope]) => allows(self, scope));
      return shown.length > 0 && html`${group && html`<b id=${`group-${group}`}>${s.pages.groups[group]}</b>`}
        <ul aria-labelledby=${group ? `group-${group}` : null} onClick=${() => setMore(false)}>${shown.map(([name, segments]) => html`<li key=${name} class=${BAR.has(name) ? "" : "further"}>
          <${Link} href=${to(segments)} aria-current=${page === segments[0] ? "page" : null}>${s.pages[name]}<//><${Count} n=${counts[name]} /></li>`)}</ul>`;
    })}
    ${further.length > 0 && html`<button type="button" class="more" aria-expanded=${more} onClick=${() => setMore(!more)}>${s.pages.more}<${Count} n=${further.some(([name]) => name === "admissions") && counts.admissions} /></button>`}
  </nav>`;
}

// OWN is the address of this script, which has the hash of all files of the console in it.
const OWN = new URL(document.querySelector("script[type=module]").src).pathname;

// Update offers to load the console again when the node serves another one, which it may after the stream was lost.
function Update() {
  const { state } = useStreamState();
  const [other, setOther] = useState(false);
  const lost = useRef(false);
  useEffect(() => {
    if (state === "lost") lost.current = true;
    if (state !== "live" || !lost.current) return;
    lost.current = false;
    fetch(ROOT, { cache: "no-store" }).then(async (page) => page.ok && setOther(!(await page.text()).includes(OWN))).catch(() => {}); // looked for again after the next loss
  }, [state]);
  return other && html`<p class="notice" role="status">${s.session.update} <button type="button" onClick=${() => location.reload()}>${s.session.reload}</button></p>`;
}

// Live says whether the page follows the fleet, in a sign and a word.
function Live() {
  const { state } = useStreamState();
  return html`<span class=${"live " + state} role="status"><span aria-hidden="true">${state === "live" ? "●" : "○"}</span> ${s.stream[state]}</span>`;
}

function Search({ q }) {
  const field = useRef(null);
  useEffect(() => { field.current.value = q; }, [q]);
  useLayoutEffect(() => { // with the field, not a frame later, when a first key may have been pressed
    const press = (event) => {
      if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, [contenteditable]")) return;
      event.preventDefault();
      field.current.focus();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
  const submit = (event) => {
    event.preventDefault();
    go(to(["devices"], { q: field.current.value.trim() }));
  };
  return html`<form role="search" class="search" onSubmit=${submit}><input ref=${field} type="search" aria-label=${s.search.hint} placeholder=${s.search.hint} spellcheck=${false} autocapitalize="off"
    onKeyDown=${(e) => e.key === "Escape" && e.target.blur()} /><kbd aria-hidden="true">/</kbd></form>`;
}

function Frame({ self }) {
  const route = useRoute();
  const needs = useNeeds(self);
  const [inUTC, setUTC] = useState(utc.get());
  useTick(30_000);
  const setClock = (on) => { utc.set(on); setUTC(on); };
  const content = useRef(null);
  const skip = (event) => { event.preventDefault(); content.current.querySelector("h1")?.focus(); };
  return html`<a class="skip" href="#content" onClick=${skip}>${s.skip}</a>
    <${Navigation} self=${self} page=${route.segments[0]} needs=${needs} />
    <div class="body">
      <header class="bar"><${Search} q=${(route.segments.join() === "devices" && route.query.get("q")) || ""} /><${Live} />
        <details class="who menu"><summary>${s.session.signedIn(line(self.name, 40))}</summary><div>
          ${self.expires && html`<p>${s.session.ends(until(self.expires))}</p>`}
          <p class="faint">${self.scopes.join(", ")}</p>
          <label class="check"><input type="checkbox" checked=${inUTC} onChange=${(e) => setClock(e.target.checked)} /> ${s.session.utc}</label>
          ${self.key !== "open" && html`<${Allow} /><button type="button" onClick=${() => api.logout(!!self.through)}>${s.session.logout}</button>`}
        </div></details>
      </header>
      <${Update} />
      ${!isSecureContext && self.key !== "open" && html`<p class="notice warn">${s.session.insecure}</p>`}
      <main id="content" ref=${content} key=${route.segments.join("/") + inUTC}>${choose(route, self, needs)}</main>
    </div>`;
}

// App asks who the caller is, again after each change of the key, and shows the dialogs that requests wait for.
function App() {
  const [self, setSelf] = useState(null);
  const [login, setLogin] = useState(null); // {reason, done}
  const [confirmation, setConfirmation] = useState(null); // {problem, options, done}
  const [failed, setFailed] = useState("");

  useEffect(() => {
    let current = 0;
    const identify = async () => {
      const mine = ++current;
      stream.stop();
      try {
        const found = await whoami();
        if (mine !== current) return;
        setFailed("");
        setSelf(found);
        dispatchEvent(new Event(KEY_CHANGED)); // what is shown may be of another key
        stream.start(found.key);
      } catch (error) {
        if (mine !== current) return;
        setFailed(error.message);
        setTimeout(() => mine === current && identify(), 3000);
      }
    };
    api.handlers.ask = (reason) => new Promise((done) => setLogin({ reason: reason === true ? s.login.wrong : reason, done }));
    api.handlers.confirm = (problem, options) => new Promise((done) => setConfirmation({ problem, options, done }));
    api.handlers.changed = () => {
      if (!api.key.get()) setSelf(null);
      identify();
    };
    const begin = () => redeem().catch((error) => api.handlers.ask(`${s.login.code} (${error.message})`)).then(identify);
    const link = () => { // in a tab that shows the console, a link changes the hash alone
      if (!coded()) return;
      if (api.key.get() && !confirm(s.login.switch)) return forgetCode();
      begin().then(() => setLogin((open) => { open?.done(); return null; }));
    };
    begin();
    addEventListener("hashchange", link);
    return () => removeEventListener("hashchange", link);
  }, []);

  const loggedIn = () => { login.done(); setLogin(null); };
  const confirmed = (yes) => { confirmation.done(yes); setConfirmation(null); };
  return html`${self ? html`<${Frame} self=${self} />` : html`<main><h1 class="brand">fleetd</h1>${failed && html`<p class="notice">${failed}</p>`}</main>`}
    ${login && html`<${Login} reason=${login.reason} again=${!!self} onDone=${loggedIn} />`}
    ${confirmation && html`<${Confirmation} ...${confirmation} onDone=${confirmed} />`}`;
}

const coded = () => new URLSearchParams(location.hash.slice(1)).get("code");

// redeem exchanges the one-time code of `fleetd console` for a key, and removes it from the address and the history.
async function redeem() {
  const code = coded();
  if (!code) return;
  forgetCode();
  const before = api.key.get();
  const made = await api.request("POST", "/v1/console/keys", { body: { code }, public: true });
  if (before) api.endMade(before);
  fresh = true;
  api.key.set(made.token, false);
}

// forgetCode removes a code from the address and the history.
const forgetCode = () => history.replaceState(null, "", location.pathname + location.search);

// whoami asks who the caller is. Behind a balancer the next request may reach a node that has not received a key which
// was made a moment ago.
async function whoami() {
  for (let left = fresh ? 10 : 0; ; left--) {
    try {
      const found = await api.request("GET", "/v1/self", left ? { public: true } : {});
      fresh = false;
      return found;
    } catch (error) {
      if (error.status !== 401 || !left) throw error;
      await new Promise((done) => setTimeout(done, 300));
    }
  }
}

let fresh = false; // the key comes from a code and was not used yet

const root = document.getElementById("app");
root.textContent = "";
render(html`<${App} />`, root);
