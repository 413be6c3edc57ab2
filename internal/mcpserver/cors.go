package mcpserver

import (
	"net/http"
	"slices"
	"strings"
)

// What a page of another origin may do that checkPlace let in. Pages hold their
// key themselves, so that nothing that a browser adds by itself is asked for:
// no cookies, no credentials.
const (
	pageMethods = "GET, POST, DELETE"
	pageHeaders = "Authorization, Content-Type, Accept, Last-Event-ID, Mcp-Session-Id, Mcp-Protocol-Version, Mcp-Method, Mcp-Name"
	pageReads   = "Mcp-Session-Id, WWW-Authenticate, Retry-After"
	pageMaxAge  = "7200" // seconds; some browsers keep nothing longer
)

// allowPage lets the page that a request came from read the answer, whatever
// it will be; checkPlace must have let the request in. It answers what the
// browser asks before the request itself, and tells so: no key comes with that.
// Where nobody has to show a key, only pages that the operator named get that
// far: whatever else this machine serves is not meant by that.
func (s *Server) allowPage(w http.ResponseWriter, r *http.Request) (answered bool) {
	origin := r.Header.Get("Origin")
	if origin == "" || s.opt.Door.Open && !s.listedPage(origin) {
		return false
	}
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", origin)
	h.Add("Vary", "Origin")
	if r.Method != http.MethodOptions || r.Header.Get("Access-Control-Request-Method") == "" {
		h.Set("Access-Control-Expose-Headers", pageReads)
		return false
	}
	h.Set("Access-Control-Allow-Methods", pageMethods)
	h.Set("Access-Control-Allow-Headers", pageHeaders)
	h.Set("Access-Control-Max-Age", pageMaxAge)
	w.WriteHeader(http.StatusNoContent)
	return true
}

func (s *Server) listedPage(origin string) bool {
	return slices.ContainsFunc(s.opt.Origins, func(o string) bool { return strings.EqualFold(o, origin) })
}
