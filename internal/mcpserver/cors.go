package mcpserver

import "net/http"

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
func allowPage(w http.ResponseWriter, r *http.Request) (answered bool) {
	origin := r.Header.Get("Origin")
	if origin == "" {
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
