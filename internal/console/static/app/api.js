// Requests to the REST API. Keys are kept in web storage alone: never in a URL, a message to another tab or the
// document. A 401 waits for a new key and repeats the request, a 428 for the person's confirmation.

const KEY = "fleetd.key";
const LOGOUT = "fleetd.logout";

// ApiError is an answer that is not a success, or the lack of an answer (status 0).
export class ApiError extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `HTTP ${status}`);
    this.status = status;
    this.code = problem.code || "";
    this.problem = problem;
  }
}

// handlers are set by main.js: they show the dialogs that a request may need. ask(reason) resolves when there is
// another key; confirm(problem, what) resolves to whether the person agreed; changed() reports another key.
export const handlers = { ask: null, confirm: null, changed: null };

export const key = {
  get: () => sessionStorage.getItem(KEY) || localStorage.getItem(KEY) || "",
  set(token, keep) {
    key.clear();
    (keep ? localStorage : sessionStorage).setItem(KEY, token);
    handlers.changed?.();
  },
  clear() {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
  },
};

// logout removes the key in all tabs of this browser: other tabs see the change of the entry. A key that was made for
// this console ends; one that somebody pasted may be in use elsewhere.
export function logout(made) {
  if (made) endMade(key.get());
  key.clear();
  localStorage.setItem(LOGOUT, String(Date.now()));
  handlers.changed?.();
}

// endMade ends a key that was made for a console; others are refused. It ends by itself, later, if this fails.
export function endMade(token) {
  fetch("/v1/self", { method: "DELETE", headers: { Authorization: `Bearer ${token}` }, keepalive: true }).catch(() => {});
}

addEventListener("storage", (event) => {
  if (event.key !== LOGOUT) return;
  key.clear();
  handlers.changed?.();
});

// Ages are counted with the server's clock, because that of the browser may be wrong.
let clockOffset = 0;
export const now = () => Date.now() + clockOffset;

function noteClock(response) {
  const date = Date.parse(response.headers.get("Date"));
  if (Number.isNaN(date)) return;
  const offset = date + 500 - Date.now();
  if (Math.abs(offset - clockOffset) > 2000) clockOffset = Math.abs(offset) > 2000 ? offset : 0;
}

// path joins segments, each encoded. Colons stay readable: they are legal in a path.
export const path = (...segments) => "/" + segments.map((s) => encodeURIComponent(s).replaceAll("%3A", ":")).join("/");

export function query(parameters) {
  const q = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) if (value !== "" && value != null && value !== false) q.set(name, value);
  const text = q.toString();
  return text && "?" + text;
}

export const ACTED = "fleetd.acted"; // an event of the window: a request changed something

let asking = null; // one dialog for all requests that wait for a key

export function askForKey(reason) {
  asking ??= handlers.ask(reason).finally(() => { asking = null; });
  return asking;
}

// send makes one request and returns the response, whose status is a success. Options: body (a file, an object, or the
// JSON text of one that is not empty), headers, signal, what (a title for the confirmation), and public (a 401 is an
// answer like others).
export async function send(method, url, options = {}) {
  for (let confirmation; ;) {
    const used = key.get();
    const headers = used ? { Authorization: `Bearer ${used}`, ...options.headers } : { ...options.headers };
    let { body } = options;
    if (body !== undefined) {
      const file = body instanceof Blob;
      headers["Content-Type"] = file ? "application/octet-stream" : "application/json";
      if (!file && typeof body !== "string") body = JSON.stringify(body);
      if (confirmation) body = `${body.slice(0, -1)},"confirmation":${JSON.stringify(confirmation)}}`;
    }
    let response;
    try {
      response = await fetch(url, { method, headers, body, signal: options.signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, { detail: "The node cannot be reached.", code: "unreachable" });
    }
    noteClock(response);
    if (response.ok) {
      if (method !== "GET") dispatchEvent(new Event(ACTED));
      return response;
    }
    const problem = await response.json().catch(() => ({ title: response.statusText }));
    if (response.status === 401 && handlers.ask && !options.public) {
      if (key.get() === used) await askForKey(!!used);
      if (options.signal?.aborted) throw new DOMException("left the page", "AbortError");
      continue;
    }
    if (response.status === 428 && problem.confirmation && !confirmation && await handlers.confirm(problem, options)) {
      confirmation = problem.confirmation;
      continue;
    }
    throw new ApiError(response.status, problem);
  }
}

// request returns the decoded JSON of an answer, or null if there is none.
export async function request(method, url, options) {
  const response = await send(method, url, options);
  return response.status === 204 ? null : response.json();
}

export const get = (url, signal) => request("GET", url, { signal });

// IMAGES are the types that may be shown as a picture; all others stay bytes, whatever a server says.
export const IMAGES = new Set(["image/jpeg", "image/png", "image/webp", "image/gif"]);

// picture loads an image and returns a blob URL, to be revoked by the caller.
export async function picture(url, signal) {
  const response = await send("GET", url, { signal });
  const type = (response.headers.get("Content-Type") || "").split(";")[0].trim();
  if (!IMAGES.has(type)) throw new ApiError(response.status, { detail: `This is not a picture but ${type || "of no known type"}.`, code: "not_a_picture" });
  return URL.createObjectURL(new Blob([await response.arrayBuffer()], { type }));
}

// save offers bytes as a file, download what a GET answers: a link could not carry the key.
export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export const download = async (url, name) => save(await (await send("GET", url)).blob(), name);

// random is an id for idempotency keys. crypto.randomUUID does not exist on plain HTTP.
export const random = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) => b.toString(16).padStart(2, "0")).join("");
