package fleettest

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

const publicAPI = "https://fleet.example.org"

// application is a host of language models that logs in at the nodes of a fleet.
type application struct {
	t      *testing.T
	client *http.Client
	id     string
}

const hostRedirect, hostVerifier = "http://localhost:3118/callback", "a-verifier-of-at-least-43-characters-for-pkce-0123456789"

func newApplication(t *testing.T) *application {
	return &application{t: t, client: &http.Client{Timeout: 30 * time.Second, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}}
}

func (h *application) do(method, address, kind, body string, headers ...string) (status int, header http.Header, answer []byte) {
	h.t.Helper()
	r, err := http.NewRequestWithContext(h.t.Context(), method, address, strings.NewReader(body))
	if err != nil {
		h.t.Fatal(err)
	}
	r.Header.Set("Content-Type", kind)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	resp, err := h.client.Do(r)
	if err != nil {
		h.t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err = io.ReadAll(resp.Body)
	if err != nil {
		h.t.Fatal(err)
	}
	return resp.StatusCode, resp.Header, answer
}

// hostTokens is an answer of the token endpoint.
type hostTokens struct {
	Access  string `json:"access_token"`
	Refresh string `json:"refresh_token"`
	Error   string `json:"error"`
}

func (h *application) tokens(n *Node, form url.Values) (status int, out hostTokens) {
	h.t.Helper()
	form.Set("client_id", h.id)
	status, _, body := h.do("POST", n.Info.API+"/oauth/token", "application/x-www-form-urlencoded", form.Encode())
	if err := json.Unmarshal(body, &out); err != nil {
		h.t.Fatalf("%d %s", status, body)
	}
	return status, out
}

func (h *application) refresh(n *Node, token string) (status int, out hostTokens) {
	h.t.Helper()
	return h.tokens(n, url.Values{"grant_type": {"refresh_token"}, "refresh_token": {token}})
}

// logIn registers and asks at one node, and takes its tokens at another one. secret is what the person enters.
func (h *application) logIn(at, then *Node, secret string) hostTokens {
	h.t.Helper()
	status, _, body := h.do("POST", at.Info.API+"/oauth/register", "application/json", `{"client_name":"Host","redirect_uris":["`+hostRedirect+`"]}`)
	var made struct {
		ID string `json:"client_id"`
	}
	if err := json.Unmarshal(body, &made); err != nil || status != 201 {
		h.t.Fatalf("%d %s", status, body)
	}
	h.id = made.ID
	sum := sha256.Sum256([]byte(hostVerifier))
	query := url.Values{"response_type": {"code"}, "client_id": {h.id}, "redirect_uri": {hostRedirect}, "state": {"s"}, "code_challenge": {base64.RawURLEncoding.EncodeToString(sum[:])}, "code_challenge_method": {"S256"}}
	form := url.Values{"decision": {"allow"}, "secret": {secret}, "scope": {"devices:read", "tools:call"}}
	status, header, body := h.do("POST", at.Info.API+"/oauth/authorize?"+query.Encode(), "application/x-www-form-urlencoded", form.Encode(), "Sec-Fetch-Site", "same-origin")
	to, err := url.Parse(header.Get("Location"))
	if status != 303 || err != nil {
		h.t.Fatalf("%d %s", status, body)
	}
	status, out := h.tokens(then, url.Values{"grant_type": {"authorization_code"}, "code": {to.Query().Get("code")}, "redirect_uri": {hostRedirect}, "code_verifier": {hostVerifier}})
	if status != 200 {
		h.t.Fatalf("%d %+v", status, out)
	}
	return out
}

// opens returns the status with which a node answers a token at /mcp.
func (h *application) opens(n *Node, token string) int {
	h.t.Helper()
	status, _, _ := h.do("POST", n.Info.API+"/mcp", "application/json", `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"host","version":"1"}}}`,
		"Authorization", "Bearer "+token, "Accept", "application/json, text/event-stream")
	return status
}

// A grant is one on all nodes: its tokens are valid at once, are refreshed anywhere, and end everywhere.
func TestGrantAcrossNodes(t *testing.T) {
	t.Parallel()
	c := programs.StartCluster(t, ClusterOptions{Nodes: 2, Args: []string{"--public-api-url", publicAPI, "--oauth-cimd=false"}})
	one, two := c.Nodes[0], c.Nodes[1]
	one.AwaitStored(t)
	code, err := apiclient.Send[api.ConsoleCode](t.Context(), two.Client, apiclient.Request{Method: "POST", Path: []string{"console", "codes"}, Body: api.NewConsoleCode{For: "consent"}})
	if err != nil {
		t.Fatal(err)
	}
	h := newApplication(t)
	first := h.logIn(one, two, code.Code)
	for _, n := range c.Nodes {
		if status := h.opens(n, first.Access); status != 200 {
			t.Errorf("a new token: %d", status)
		}
	}
	_, second := h.refresh(one, first.Refresh)
	if status, again := h.refresh(two, first.Refresh); status != 200 || again.Refresh != second.Refresh {
		t.Errorf("the same token at another node: %d %+v, want %s", status, again, second.Refresh)
	}
	status, third := h.refresh(two, second.Refresh)
	if status != 200 || h.opens(one, third.Access) != 200 {
		t.Errorf("%d %+v", status, third)
	}
	if status, _, body := h.do("GET", one.Info.API+"/v1/devices", "", "", "Authorization", "Bearer "+third.Access); status != 403 {
		t.Errorf("REST: %d %s", status, body)
	}
	if status, _, body := h.do("POST", one.Info.API+"/oauth/revoke", "application/x-www-form-urlencoded", url.Values{"token": {third.Refresh}, "client_id": {h.id}}.Encode()); status != 200 {
		t.Fatalf("%d %s", status, body)
	}
	// security: H26
	two.Await(t, "the grant ends at the other node", time.Minute, func() bool { return h.opens(two, third.Access) == 401 })
	if status, out := h.refresh(two, third.Refresh); status != 400 || out.Error != "invalid_grant" {
		t.Errorf("%d %+v", status, out)
	}
}

// An application's token is no login to NATS.
func TestAccessTokenIsNoLogin(t *testing.T) {
	t.Parallel()
	node := programs.Start(t, natsFlag, "0.0.0.0:0", "--public-api-url", publicAPI, "--oauth-cimd=false")
	at, err := url.Parse(node.Info.NATS)
	if err != nil {
		t.Fatal(err)
	}
	code, err := apiclient.Send[api.ConsoleCode](t.Context(), node.Client, apiclient.Request{Method: "POST", Path: []string{"console", "codes"}, Body: api.NewConsoleCode{For: "consent"}})
	if err != nil {
		t.Fatal(err)
	}
	h := newApplication(t)
	tokens := h.logIn(node, node, code.Code)
	if status := h.opens(node, tokens.Access); status != 200 {
		t.Errorf("MCP: %d", status)
	}
	connect := func(token string) (*nats.Conn, error) {
		return nats.Connect("nats://127.0.0.1:"+at.Port(), nats.Token(token), nats.MaxReconnects(0))
	}
	for _, token := range []string{tokens.Access, tokens.Refresh} {
		// security: H21
		if _, err := connect(token); !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("a login with a token of an application: %v", err)
		}
	}
}

// Without the login, the public name still is that of MCP, for hosts and for doctor.
func TestPublicNameWithoutLogin(t *testing.T) {
	t.Parallel()
	node := programs.Start(t, "--public-api-url", publicAPI, "--oauth=false")
	h := newApplication(t)
	if status, _, body := h.do("GET", node.Info.API+"/.well-known/oauth-protected-resource/mcp", "", ""); status != 200 || !strings.Contains(string(body), `"resource":"`+publicAPI+`/mcp"`) || strings.Contains(string(body), "authorization_servers") {
		t.Errorf("metadata: %d %s", status, body)
	}
	if status, _, body := h.do("GET", node.Info.API+"/.well-known/oauth-authorization-server", "", ""); status != 404 {
		t.Errorf("an authorization server: %d %s", status, body)
	}
	if d, err := node.Client.Diagnose(t.Context(), ""); err != nil || d.PublicAPIURL != publicAPI {
		t.Errorf("doctor looks at %q: %v", d.PublicAPIURL, err)
	}
}
