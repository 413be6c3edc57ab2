package console

import (
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"io/fs"
	"maps"
	"net/http"
	"net/http/httptest"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

func get(h http.Handler, target string, change func(*http.Request)) *httptest.ResponseRecorder {
	r, w := httptest.NewRequest("GET", target, nil), httptest.NewRecorder()
	if change != nil {
		change(r)
	}
	h.ServeHTTP(w, r)
	return w
}

func TestHeaders(t *testing.T) {
	h := New()
	want := map[string]string{
		"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; " +
			"manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
		"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
		"Cross-Origin-Resource-Policy": "same-origin", "X-Frame-Options": "DENY",
	}
	paths := append(slices.Collect(maps.Keys(h.load().static)), "/console/", "/console/devices/aa:bb:cc:dd:ee:ff", "/console/static/", "/console/static/00000000/app/main.js")
	for _, target := range paths {
		w := get(h, target, nil)
		for name, value := range want {
			// security: N45
			if got := w.Header()[name]; len(got) != 1 || got[0] != value {
				t.Errorf("%s: %s is %q", target, name, got)
			}
		}
	}
}

// Browsers take the opener policy only from a secure context, and log an error elsewhere.
func TestOpenerPolicy(t *testing.T) {
	h := New()
	for host, want := range map[string]string{"localhost:8080": "same-origin", "127.0.0.1:8080": "same-origin", "127.9.9.9": "same-origin",
		"[::1]:8080": "same-origin", "192.0.2.1:8080": "", "fleet.example.com": "", "localhost.example.com": ""} {
		if got := get(h, "/console/", func(r *http.Request) { r.Host = host }).Header().Get("Cross-Origin-Opener-Policy"); got != want {
			t.Errorf("%s: %q", host, got)
		}
	}
	if got := get(h, "/console/", func(r *http.Request) { r.Host, r.TLS = "fleet.example.com", &tls.ConnectionState{} }).Header().Get("Cross-Origin-Opener-Policy"); got != "same-origin" {
		t.Errorf("TLS: %q", got)
	}
}

func TestPaths(t *testing.T) {
	h := New()
	index := get(h, "/console/", nil)
	if index.Code != 200 || index.Header().Get("Content-Type") != "text/html; charset=utf-8" || index.Header().Get("Cache-Control") != "no-cache" || strings.Contains(index.Body.String(), "{{") {
		t.Fatalf("%d %v %s", index.Code, index.Header(), index.Body)
	}
	if n := index.Body.Len(); n > 4<<10 {
		t.Errorf("the index has %d bytes", n)
	}
	for _, target := range []string{"/console/devices", "/console/devices/aa:bb:cc:dd:ee:ff/tools", "/console/devices/lamp.7", "/console/nowhere", "/console/static", "/console/index.html", "/console/..%2f..%2fetc/passwd"} {
		if w := get(h, target, nil); w.Code != 200 || w.Body.String() != index.Body.String() {
			t.Errorf("%s: %d", target, w.Code)
		}
	}
	if w := get(h, "/console/", func(r *http.Request) { r.Header.Set("If-None-Match", index.Header().Get("ETag")) }); w.Code != 304 {
		t.Errorf("the index again: %d", w.Code)
	}
	root := regexp.MustCompile(`/console/static/[0-9a-f]{8}/`).FindString(index.Body.String())
	for _, target := range []string{"/console/static/", root, root + "app/", root + "app/none.js", root + "index.html", root + "../console.go", strings.Replace(root+"app/main.js", root, "/console/static/00000000/", 1)} {
		if w := get(h, target, nil); w.Code != 404 || w.Header().Get("Cache-Control") != "no-store" {
			t.Errorf("%s: %d %v", target, w.Code, w.Header())
		}
	}
	modules := 0
	for target := range h.load().static {
		w := get(h, target, nil)
		if w.Code != 200 || w.Header().Get("Cache-Control") != "public, max-age=31536000, immutable" || w.Header().Get("ETag") == "" {
			t.Errorf("%s: %d %v", target, w.Code, w.Header())
		}
		if path.Ext(target) == ".js" {
			modules++
			if w.Header().Get("Content-Type") != "text/javascript; charset=utf-8" || strings.Contains(index.Body.String(), `<link rel="modulepreload" href="`+target+`">`) == strings.HasSuffix(target, later) {
				t.Errorf("%s: %v, or not preloaded, or before it is needed", target, w.Header())
			}
		}
	}
	if modules == 0 {
		t.Error("no modules")
	}
}

// Modules become one module, each after those that it imports, and what is written wrongly is found at the start.
func TestBundle(t *testing.T) {
	source := map[string]string{
		"app/main.js":      "// Only a comment.\nimport { h } from \"../vendor/v.js\";\nimport { a, b as c } from \"./x.js\";\nimport * as all from \"./x.js\";\n\n  h(a, c, all.b); // it's\n  f(\"a // b\"); // a comment",
		"app/x.js":         "import other from \"../vendor/w.js\";\nimport { d } from \"./pages/y.js\";\nexport { y } from \"../vendor/u.js\";\nexport const a = other + d;\nexport async function* b() {}",
		"app/pages/y.js":   "export class d {}",
		"vendor/v.js":      "import{x as n,y}from\"./u.js\";var t=n+y;export{t as h,n};",
		"vendor/u.js":      "const x=\"import{a}\",y=2;export{x,y}\n",
		"vendor/w.js":      "/*! W */\nvar n=1;export default function(s){return n+s}",
		"app/not-used.js":  "",
		"vendor/unused.js": "",
	}
	want := `const $vendor_u = (() => {
const x="import{a}",y=2;
return { x: x, y: y };
})();
const $vendor_v = (() => {
const { x: n,y } = $vendor_u;
var t=n+y;
return { h: t, n: n };
})();
const $vendor_w = (() => {
/*! W */
var n=1;const $default = function(s){return n+s};
return { default: $default };
})();
const{d}=(() => {
class d {}
return{d}})();
const{y,a,b}=(() => {
const {default: other}=$vendor_w;const {y}=$vendor_u;const a=other+d;async function* b() {}
return{y,a,b}})();
const $app_x = { y, a, b };
const{}=(() => {
const {h}=$vendor_v;const c=b;const all=$app_x;h(a, c, all.b); // it's
f("a // b");
return{}})();
`
	join := func(change func(map[string][]byte)) (string, error) {
		files := map[string][]byte{}
		for name, text := range source {
			files[name] = []byte(text)
		}
		change(files)
		bundled, err := newBundle(files, "app/main.js")
		return string(bundled), err
	}
	if got, err := join(func(map[string][]byte) {}); err != nil || got != want {
		t.Errorf("%v\n%s", err, got)
	}
	for fault, change := range map[string]func(map[string][]byte){
		"app/main.js -> app/x.js -> app/pages/y.js": func(f map[string][]byte) { f["app/pages/y.js"] = []byte("import { a } from \"../x.js\";") },
		"app/x.js has no export a":                  func(f map[string][]byte) { f["app/x.js"] = []byte("export const b = 1;") },
		"vendor/v.js is not a file":                 func(f map[string][]byte) { delete(f, "vendor/v.js") },
		"app/x.js has no export z":                  func(f map[string][]byte) { f["app/main.js"] = []byte("import { z } from \"./x.js\";") },
		"both export d; rename one":                 func(f map[string][]byte) { f["app/x.js"] = append(f["app/x.js"], "\nexport const d = 1;"...) },
		"a cannot be imported as e": func(f map[string][]byte) {
			f["app/main.js"] = []byte("import { a as e } from \"./x.js\";\nfunction a() {}")
		},
		"d cannot be imported as e": func(f map[string][]byte) {
			f["app/main.js"] = []byte("import { a as d } from \"./x.js\";\nimport { d as e } from \"./pages/y.js\";")
		},
		"vendor/v.js has no export i":                func(f map[string][]byte) { f["app/main.js"] = []byte("import { i } from \"../vendor/v.js\";") },
		"only what libraries export can be exported": func(f map[string][]byte) { f["app/x.js"] = []byte("export { d } from \"./pages/y.js\";") },
		"vendor/v.js imports or exports":             func(f map[string][]byte) { f["vendor/v.js"] = []byte("var h=1;import(\"./u.js\");export{h};") },
		"vendor/w.js imports or exports in":          func(f map[string][]byte) { f["vendor/w.js"] = []byte("var h=1;") },
		"app/x.js:1":                                 func(f map[string][]byte) { f["app/x.js"] = []byte("import \"./pages/y.js\";") },
	} {
		if _, err := join(change); err == nil || !strings.Contains(err.Error(), fault) {
			t.Errorf("%s: %v", fault, err)
		}
	}
}

// Each string has its name in strings.js, and each name there is used.
func TestStrings(t *testing.T) {
	own := ownModules(t)
	var all strings.Builder
	for name, text := range own {
		if name != "static/app/strings.js" {
			all.WriteString(text)
		}
	}
	catalogue, sentences, _ := strings.Cut(own["static/app/strings.js"], "\nexport const s = {")
	sections := regexp.MustCompile(`(?m)^  (\w+): ?\{`).FindAllStringSubmatch(sentences, -1)
	if len(sections) < 15 {
		t.Fatalf("%d sections found", len(sections))
	}
	for _, section := range sections {
		if !strings.Contains(all.String(), "s."+section[1]) {
			t.Errorf("nothing uses s.%s", section[1])
		}
	}
	for _, kind := range regexp.MustCompile(`(?m)^  (\w+): ?\{`).FindAllStringSubmatch(catalogue, -1) {
		if used := all.String() + catalogue; !strings.Contains(used, `word("`+kind[1]+`"`) && !strings.Contains(used, "codes."+kind[1]) {
			t.Errorf("nothing uses the words of the codes %s", kind[1])
		}
	}
}

// A text of another module than strings.js that contained an operator or a brace with spaces would lose them in the bundle.
func TestTextsKeepTheirSpaces(t *testing.T) {
	quoted := regexp.MustCompile(`"(?:[^"\\\n]|\\.)*"`)
	own := ownModules(t)
	if own["static/"+texts] == "" {
		t.Fatal("there is no module of texts")
	}
	delete(own, "static/"+texts)
	for name, source := range own {
		for line := range strings.Lines(source) {
			for _, text := range quoted.FindAllString(line, -1) {
				if !strings.HasPrefix(strings.TrimSpace(line), "//") && codeSpace.MatchString(text) {
					t.Errorf("%s: %s", name, text)
				}
			}
		}
	}
}

// ownModules returns the modules of the console by name.
func ownModules(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := fs.WalkDir(files, "static/app", func(name string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			body, err := files.ReadFile(name)
			found[name] = string(body)
			return err
		}
		return err
	})
	if err != nil || len(found) < 20 {
		t.Fatal(len(found), err)
	}
	for name, text := range found {
		if n := strings.Count(text, "\n"); n > 500 {
			t.Errorf("%s has %d lines", name, n)
		}
	}
	return found
}

// What others wrote is what they published: scripts/vendor-console writes the files and their hashes.
func TestVendor(t *testing.T) {
	var versions struct {
		SHA256 map[string]string `json:"sha256"`
	}
	text, err := files.ReadFile("static/vendor/versions.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &versions); err != nil {
		t.Fatal(err)
	}
	entries, err := files.ReadDir("static/vendor")
	if err != nil || len(entries) != len(versions.SHA256)+1 {
		t.Fatalf("%d files, %d hashes: %v", len(entries), len(versions.SHA256), err)
	}
	for name, want := range versions.SHA256 {
		body, err := files.ReadFile("static/vendor/" + name)
		// security: N46
		if sum := sha256.Sum256(body); err != nil || hex.EncodeToString(sum[:]) != want {
			t.Errorf("%s: %x, %v", name, sum, err)
		}
	}
}

// forbidden is what own code and the index must not contain: ways from text to markup or code,
// styles as text, other hosts.
var forbidden = regexp.MustCompile(`innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|dangerously|\sstyle=|https?://`)

func TestNoUnsafeCode(t *testing.T) {
	for _, text := range []string{"x.innerHTML = y", `<p style="a">`, `fetch("https://a")`, "new Function()"} {
		if !forbidden.MatchString(text) {
			t.Fatalf("%q is not found", text)
		}
	}
	h := New()
	index := get(h, "/console/", nil).Body.String()
	// security: N45
	if found := forbidden.FindString(index); found != "" || regexp.MustCompile(`<script[^>]*>[^<]|<style|\son[a-z]+=`).MatchString(index) {
		t.Errorf("the index contains %q, or an inline script or style", found)
	}
	own := ownModules(t)
	css, err := files.ReadFile("static/app.css")
	if err != nil {
		t.Fatal(err)
	}
	own["static/app.css"] = string(css)
	for name, text := range own {
		if found := forbidden.FindString(text); found != "" {
			t.Errorf("%s contains %q", name, found)
		}
	}
}

// What a browser loads for a first page has a limit: scripts and styles together, compressed.
func TestSizes(t *testing.T) {
	total := 0
	for target, file := range New().load().static {
		if ext := path.Ext(target); (ext == ".js" || ext == ".css") && !strings.HasSuffix(target, later) {
			gzipped, _ := file.Size()
			total += gzipped
		}
	}
	if total > 90_000 {
		t.Errorf("%d bytes of scripts and styles, compressed; 90,000 are allowed", total)
	}
}

func TestUnknownType(t *testing.T) {
	files := fstest.MapFS{"static/index.html": {Data: []byte("x")}, "static/app/main.js": {}, "static/a.exe": {Data: []byte("x")}}
	if _, err := newPages(files); err == nil || !strings.Contains(err.Error(), "a.exe") {
		t.Errorf("%v", err)
	}
}

// Any change of a file changes the path of all files.
func TestHashOfTree(t *testing.T) {
	paths := map[string]bool{}
	for _, files := range []fstest.MapFS{
		{"static/app/main.js": {}, "static/index.html": {Data: []byte("x")}, "static/a.css": {Data: []byte("1")}},
		{"static/app/main.js": {}, "static/index.html": {Data: []byte("x")}, "static/a.css": {Data: []byte("2")}},
		{"static/app/main.js": {}, "static/index.html": {Data: []byte("y")}, "static/a.css": {Data: []byte("1")}},
	} {
		h, err := newPages(files)
		if err != nil {
			t.Fatal(err)
		}
		for target := range h.static {
			paths[target] = true
		}
	}
	if len(paths) != 6 {
		t.Errorf("%v", paths)
	}
}
