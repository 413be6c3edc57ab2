package mcpserver

import (
	"net/http"
	"strings"

	"fleetd/internal/access"
	"fleetd/internal/jsonspan"
)

// toolScopes are the scopes that the tools of the fleet need.
var toolScopes = map[string][]access.Scope{
	"find_devices":        {access.ScopeRead},
	"describe_device":     {access.ScopeRead},
	"search_device_tools": {access.ScopeRead},
	"call_device_tool":    {access.ScopeCall},
	"call_many":           {access.ScopeCall},
	"get_device_status":   {access.ScopeCall},
	"wait_for_device":     {access.ScopeRead},
	"explain_device":      {access.ScopeRead, access.ScopeEvents},
	"list_recent_events":  {access.ScopeEvents},
	"run_job":             {access.ScopeJobs, access.ScopeCall},
	"get_job":             {access.ScopeJobsRead},
}

// lacksScope answers a request of an application whose grant does not have a scope that the request needs: the host can ask the
// person for more (RFC 6750, 3.1; MCP 2026-07-28, authorization). Whoever uses a pasted key gets the error of the tool.
func (s *Server) lacksScope(w http.ResponseWriter, r *http.Request, v *requestInfo) bool {
	if r.Method != http.MethodPost {
		return false
	}
	body, err := readBody(r)
	if err != nil {
		return false // whoever reads it again answers
	}
	var missing bool
	var names []string
	for _, scope := range scopesOf(body, v) {
		missing = missing || !v.caller.Scopes.Has(scope)
		names = append(names, string(scope))
	}
	if !missing {
		return false
	}
	s.stats.Refused.Add(refusedScope, 1)
	scopes := strings.Join(names, " ")
	w.Header().Set("WWW-Authenticate", `Bearer error="insufficient_scope", scope="`+scopes+`", resource_metadata="`+s.origin(r)+PathMetadata+r.URL.Path+`"`)
	http.Error(w, "this needs the rights "+scopes+", which the person has not allowed to the application", http.StatusForbidden)
	return true
}

// scopesOf returns the scopes that a message needs. Messages of a batch get the errors of their tools.
func scopesOf(body []byte, v *requestInfo) []access.Scope {
	method, _ := callOf(body)
	name, _ := jsonspan.String(jsonspan.Member(jsonspan.Member(body, "params"), "name"))
	switch {
	case method != "tools/call":
		return nil
	case v.device != "":
		return []access.Scope{access.ScopeCall}
	}
	return toolScopes[name]
}
