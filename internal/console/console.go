// Package console serves the web console: the files of static/, which are plain ES modules and
// need no build step. The pages use the REST API like any other client, with an API key, without
// cookies; this package uses neither devices nor keys.
package console

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"path"
	"regexp"
	"strings"
	"sync"

	"fleetd/internal/precompressed"
)

// Root is the path of the console; everything below it is answered by a Handler.
const Root = "/console/"

// staticRoot is the path of the files. The next segment is the hash of all files, so that every
// file can be cached permanently, and the relative imports of the modules keep it.
const staticRoot = Root + "static/"

//go:embed static
var files embed.FS

// contentTypes are the types of files that static/ may contain.
var contentTypes = map[string]string{
	".js": "text/javascript; charset=utf-8", ".mjs": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
	".svg": "image/svg+xml", ".png": "image/png", ".json": "application/json", ".webmanifest": "application/manifest+json",
	".txt": "text/plain; charset=utf-8",
}

// entry is the module that a page loads; it imports all others, which are joined to it.
const entry = "app/main.js"

// later is a module that pages load when they need it.
const later = "vendor/uplot.js"

// styles are the own styles, which are served without comments and without the space that is
// only for people.
const styles = "app.css"

// styleComment is a comment of the styles, or the indentation of a line; styleSpace is a mark
// with spaces that mean nothing.
var (
	styleComment = regexp.MustCompile(`(?s:/\*.*?\*/)|(?m:^ +)`)
	styleSpace   = regexp.MustCompile(`\s*([{};,])\s*|(:) `)
)

// placeholder in index.html becomes the path of the files, without a slash at its end.
const placeholder = "{{static}}"

// policy forbids what a page needs in order to run a device's text as a script: inline scripts,
// inline styles, and strings that become markup (Trusted Types).
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; " +
	"manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; " +
	"require-trusted-types-for 'script'; trusted-types 'none'"

// Handler answers GET and HEAD of all paths below Root: files, else the index, which reads the
// path itself. It is safe for concurrent use.
type Handler struct{ load func() *pages }

// pages are the answers.
type pages struct {
	index  precompressed.Answer
	static map[string]precompressed.Answer // by path
}

// New returns the handler of the program's files, which are joined and compressed for the first request: most
// nodes answer none, and it would take a fifth of the CPU time in which they start.
func New() *Handler {
	return &Handler{load: sync.OnceValue(func() *pages {
		p, err := newPages(files)
		if err != nil {
			panic("the console's files: " + err.Error()) // a bug, found by any test
		}
		return p
	})}
}

func newPages(source fs.FS) (*pages, error) {
	content := map[string][]byte{}
	tree := sha256.New()
	err := fs.WalkDir(source, "static", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		body, err := fs.ReadFile(source, name)
		fmt.Fprintf(tree, "%s %d\n%s", name, len(body), body)
		content[strings.TrimPrefix(name, "static/")] = body
		return err
	})
	if err != nil {
		return nil, err
	}
	bundled, err := newBundle(content, entry)
	if err != nil {
		return nil, err
	}
	maps.DeleteFunc(content, func(name string, _ []byte) bool { return path.Ext(name) == ".js" && name != later }) // they are in the bundle
	content[entry] = bundled
	root := staticRoot + hex.EncodeToString(tree.Sum(nil))[:8]
	index := content["index.html"]
	delete(content, "index.html")
	p := &pages{static: map[string]precompressed.Answer{}}
	for name, body := range content {
		if name == styles {
			body = styleSpace.ReplaceAll(styleComment.ReplaceAll(body, nil), []byte("$1$2"))
		}
		contentType := contentTypes[path.Ext(name)]
		if contentType == "" {
			return nil, fmt.Errorf("%s has a type that is not in the table", name)
		}
		p.static[root+"/"+name] = precompressed.New(contentType, body)
	}
	p.index = precompressed.New("text/html; charset=utf-8", bytes.ReplaceAll(index, []byte(placeholder), []byte(root)))
	return p, nil
}

// ServeHTTP answers one request.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	header.Set("Content-Security-Policy", policy)
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Referrer-Policy", "no-referrer")
	header.Set("Permissions-Policy", "camera=(), microphone=(), geolocation=()")
	header.Set("Cross-Origin-Resource-Policy", "same-origin")
	header.Set("X-Frame-Options", "DENY")
	if isSecureContext(r) { // elsewhere browsers only log that they ignore it
		header.Set("Cross-Origin-Opener-Policy", "same-origin")
	}
	if !strings.HasPrefix(r.URL.Path, staticRoot) {
		header.Set("Cache-Control", "no-cache")
		h.load().index.ServeHTTP(w, r)
		return
	}
	file, ok := h.load().static[r.URL.Path]
	if !ok { // such as a file of another version, which an open page loads after an upgrade
		header.Set("Cache-Control", "no-store")
		header.Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(http.StatusNotFound)
		_, _ = w.Write([]byte("not a file of this version of the console; reload the page\n")) // the client is gone if this fails
		return
	}
	header.Set("Cache-Control", "public, max-age=31536000, immutable")
	file.ServeHTTP(w, r)
}

// isSecureContext reports whether browsers count the page as a secure context: over TLS, or at
// a loopback address.
func isSecureContext(r *http.Request) bool {
	if r.TLS != nil {
		return true
	}
	host := r.Host
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	ip, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return strings.EqualFold(host, "localhost") || err == nil && ip.IsLoopback()
}
