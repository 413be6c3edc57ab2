package node

import (
	"net/http"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/connlimit"
	"fleetd/internal/mcpserver"
	"fleetd/internal/oauth"
)

// documentClient fetches the documents of applications that log in; nil: the client of internal/oauth, which connects to public
// addresses alone. Only the program of `make hosts` sets it.
var documentClient *http.Client

// startMCP builds the server for hosts of language models.
func (n *node) startMCP() {
	if n.cfg.OAuth {
		n.service.Keys().SetAccessTokens(oauth.AccessToken(n.mint))
		n.oauth = oauth.New(oauth.Options{Issuer: n.cfg.PublicAPIURL, CIMD: n.cfg.OAuthCIMD, Hosts: n.cfg.OAuthHosts, Service: n.service, Mint: n.mint, Failures: n.failures["api-listen"], Client: documentClient, Log: n.log,
			Auth: &access.Authenticator{Keys: n.service.Keys(), IsAdmin: n.mint.IsAdmin}})
	}
	n.mcp = mcpserver.New(mcpserver.Options{PublicURL: n.cfg.PublicAPIURL, Login: n.oauth != nil, Service: n.service, Mint: n.mint, Events: n.events, Explainer: n.explain, Photos: n.vision, Audit: n.store, Jobs: n.jobs.manager, Hosts: n.cfg.MCPHosts, Origins: n.cfg.MCPOrigins,
		Failures: n.failures["api-listen"], Work: n.work,
		Auth: &access.Authenticator{Keys: n.service.Keys(), IsAdmin: n.mint.IsAdmin, Open: n.cfg.APIAuth == "none"},
		Node: n.cfg.Node, Version: n.cfg.Version, Draining: n.draining.Load, Log: n.log})
}

// withMCP serves the paths of MCP; it authenticates its callers itself.
func (n *node) withMCP(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case n.oauth != nil && oauth.Handles(r.URL.Path):
			n.oauth.ServeHTTP(w, r)
		case mcpserver.Handles(r.URL.Path):
			n.mcp.ServeHTTP(w, r)
		default:
			next.ServeHTTP(w, r)
		}
	})
}

// startMCPListener opens --mcp-listen: the paths of MCP and of OAuth, and /livez.
func (n *node) startMCPListener(api http.Handler) error {
	if n.cfg.MCPListen == "" {
		return nil
	}
	l, err := n.openAPI("mcp-listen", n.cfg.MCPListen)
	if err != nil {
		return err
	}
	handler := n.withMCP(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/livez" {
			api.ServeHTTP(w, r)
			return
		}
		http.NotFound(w, r)
	}))
	n.serve("mcp-listen", &http.Server{Handler: connlimit.RespondEarly(handler, n.pace("mcp-listen")), ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10,
		ErrorLog: n.httpErrors(), ConnContext: connlimit.WithConn}, l)
	return nil
}
