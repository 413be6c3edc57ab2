// A photo from the API. It is loaded with the key, and its memory is given back when it leaves the page.
import { html, useEffect, useState } from "./html.js";
import { path, picture } from "./api.js";
import { Problem } from "./ui.js";

export function Picture({ id, alt, ...rest }) {
  const [url, setURL] = useState("");
  const [error, setError] = useState(null);
  useEffect(() => {
    const ended = new AbortController();
    let made = "";
    picture(path("v1", "photos", id), ended.signal).then((u) => {
      made = u;
      ended.signal.aborted ? URL.revokeObjectURL(u) : setURL(u);
    }, (problem) => ended.signal.aborted || setError(problem));
    return () => { ended.abort(); URL.revokeObjectURL(made); };
  }, [id]);
  return error ? html`<${Problem} error=${error} />` : url && html`<img class="picture" src=${url} alt=${alt} ...${rest} />`;
}
