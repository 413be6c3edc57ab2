package mcpserver

import (
	"context"
	"net/http"
	"slices"
	"strings"

	"fleetd/internal/access"
	"fleetd/internal/devices"
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
	"cancel_job":          {access.ScopeJobs},
	"send_message":        {access.ScopeCall},
}

// lacksScope refuses a request of an application whose grant does not have a scope that the request needs: the host can ask the
// person for more (RFC 6750, 3.1; MCP 2026-07-28, authorization). Whoever uses a pasted key gets the error of the tool.
func (s *Server) lacksScope(r *http.Request, v *requestInfo) *refusal {
	if !v.granted || r.Method != http.MethodPost {
		return nil
	}
	body, err := readBody(r)
	if err != nil {
		return nil // whoever reads it again answers
	}
	return v.needs(s.scopesOf(r.Context(), body, v)...)
}

// needs refuses an application without all of these scopes.
func (v *requestInfo) needs(scopes ...access.Scope) *refusal {
	if !v.granted || !slices.ContainsFunc(scopes, func(scope access.Scope) bool { return !v.caller.Scopes.Has(scope) }) {
		return nil
	}
	names := devices.Texts(scopes)
	denied := refuse(refusedScope, devices.CodeForbidden, "this needs the rights "+strings.Join(names, " ")+", which the person has not allowed to the application")
	denied.scopes = strings.Join(names, " ")
	return denied
}

// scopesOf returns the scopes that a message needs. Messages of a batch get the errors of their tools.
func (s *Server) scopesOf(ctx context.Context, body []byte, v *requestInfo) []access.Scope {
	method, _ := callOf(body)
	params := jsonspan.Member(body, "params")
	name, _ := jsonspan.String(jsonspan.Member(params, "name"))
	switch {
	case strings.HasPrefix(method, "resources/"):
		uri, _ := jsonspan.String(jsonspan.Member(params, "uri"))
		if of, err := parseURI(uri); err == nil && of.photo != "" {
			return []access.Scope{access.ScopePhotos}
		}
		return []access.Scope{access.ScopeRead}
	case method != "tools/call":
		return nil
	case v.device != "":
		if s.isUserOnly(ctx, v.by(), string(v.device), name) {
			return []access.Scope{access.ScopeCall, access.ScopeUser}
		}
		return []access.Scope{access.ScopeCall}
	}
	argument := func(name string) string {
		text, _ := jsonspan.String(jsonspan.Member(jsonspan.Member(params, "arguments"), name))
		return text
	}
	scopes := toolScopes[name]
	if argument("later") != "" {
		scopes = append(slices.Clip(scopes), access.ScopeJobs)
	}
	if tool := argument("tool"); tool != "" && s.isUserOnly(ctx, v.by(), argument("device"), tool) {
		scopes = append(slices.Clip(scopes), access.ScopeUser)
	}
	return scopes
}

// isUserOnly reports whether a tool is user-only, on any device or on the one with this id or name.
func (s *Server) isUserOnly(ctx context.Context, by access.Principal, device, tool string) bool {
	if access.IsUserTool(tool) || device == "" {
		return access.IsUserTool(tool)
	}
	view, err := s.namedView(ctx, by, device)
	if err != nil || view.index == nil {
		return false
	}
	t := view.index.find(tool)
	return t != nil && (t.userOnly || access.IsUserTool(t.name))
}
