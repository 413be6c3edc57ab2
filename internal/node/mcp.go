package node

import (
	"net/http"

	"fleetd/internal/access"
	"fleetd/internal/mcpserver"
)

// startMCP builds the server for hosts of language models.
func (n *node) startMCP() {
	n.mcp = mcpserver.New(mcpserver.Options{Service: n.service, Mint: n.mint, Events: n.events, Explainer: n.explain, Photos: n.vision, Jobs: n.jobs.manager, Hosts: n.cfg.MCPHosts, Origins: n.cfg.MCPOrigins,
		Failures: n.failures["api-listen"], Work: n.work,
		Auth: &access.Authenticator{Keys: n.service.Keys(), IsAdmin: n.mint.IsAdmin, Open: n.cfg.APIAuth == "none"},
		Node: n.cfg.Node, Version: n.cfg.Version, Draining: n.draining.Load, Log: n.log})
}

// withMCP serves the paths of MCP; it authenticates its callers itself.
func (n *node) withMCP(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if mcpserver.Handles(r.URL.Path) {
			n.mcp.ServeHTTP(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
}
