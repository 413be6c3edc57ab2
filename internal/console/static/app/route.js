// The URL holds the whole state of a page. Routes are paths below /console/; the history API changes them.
import { html, useEffect, useState } from "./html.js";

export const ROOT = "/console/";

const listeners = new Set();
addEventListener("popstate", () => announce(false));

function announce(navigated) {
  for (const listener of listeners) listener(navigated);
}

// read returns the segments of the path, decoded, and the query.
export function read() {
  const segments = location.pathname.slice(ROOT.length).split("/").filter(Boolean).map((segment) => {
    try {
      return decodeURIComponent(segment);
    } catch {
      return segment;
    }
  });
  return { segments, query: new URLSearchParams(location.search) };
}

// to builds the URL of a page: to(["devices", id], {q: "x"}).
export function to(segments, parameters = {}) {
  const q = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) if (value) q.set(name, value);
  const text = q.toString();
  return ROOT + segments.map((segment) => encodeURIComponent(segment).replaceAll("%3A", ":")).join("/") + (text && "?" + text);
}

export function go(url, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", url);
  announce(true);
}

// setQuery changes some parameters of this page; an empty value removes one. The cursor belongs to the old list.
export function setQuery(changes, options) {
  const q = new URLSearchParams(location.search);
  if (!("cursor" in changes)) q.delete("cursor");
  for (const [name, value] of Object.entries(changes)) value ? q.set(name, value) : q.delete(name);
  const text = q.toString();
  go(location.pathname + (text && "?" + text), options);
}

export function useRoute() {
  const [route, set] = useState(read);
  useEffect(() => {
    const listener = () => set(read());
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
  return route;
}

// Link is an ordinary link that changes the page without loading it again. Its href is made by to, never from text.
export function Link({ href, children, ...rest }) {
  const click = (event) => {
    if (event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    go(href);
  };
  return html`<a href=${href} onClick=${click} ...${rest}>${children}</a>`;
}
