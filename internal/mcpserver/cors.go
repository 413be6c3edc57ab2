package mcpserver

import (
	"net/http"
	"slices"
	"strings"
)

// The rights of a page of another origin that checkOrigin admitted. Pages send their
// key themselves, so nothing that browsers add is needed: no cookies, no credentials.
const (
	pageMethods = "GET, POST, DELETE"
	pageHeaders = "Authorization, Content-Type, Accept, Last-Event-ID, Mcp-Session-Id, Mcp-Protocol-Version, Mcp-Method, Mcp-Name"
	pageReads   = "Mcp-Session-Id, WWW-Authenticate, Retry-After"
	pageMaxAge  = "7200" // seconds, the maximum of some browsers
)

// allowPage lets the page that sent a request read the response; checkOrigin must have
// admitted the request. It answers preflight requests, which carry no key, and returns
// true for them. On a node that needs no key, only the origins that the operator
// configured are allowed: other local servers' pages must not get access.
func (s *Server) allowPage(w http.ResponseWriter, r *http.Request) (answered bool) {
	origin := r.Header.Get("Origin")
	if origin == "" || s.opt.Auth.Open && !s.isListedOrigin(origin) {
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

func (s *Server) isListedOrigin(origin string) bool {
	return slices.ContainsFunc(s.opt.Origins, func(o string) bool { return strings.EqualFold(o, origin) })
}
