package oauth

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"fleetd/internal/access"
	"fleetd/internal/cleantext"
	"fleetd/internal/clock"
)

// Limits of the documents of applications.
const (
	fetchTimeout   = 5 * time.Second
	maxDocument    = 64 << 10 // bytes
	maxRedirects   = 5        // of a registered application
	maxMetadata    = 1 << 10  // bytes, of a registered application
	maxClientName  = 64       // bytes that are shown
	registeredLife = 24 * time.Hour
	fetchesAtOnce  = 4
	fetchesPerMin  = 10
	fetchPause     = time.Second // between two of the same host
	maxCached      = 256         // documents
	maxKeys        = 4 << 10     // bytes, of jwks in a document
	leastCached    = 30 * time.Second
	usuallyCached  = 5 * time.Minute
	mostCached     = 24 * time.Hour
)

// clientPrefix begins the client_id of a registered application.
const clientPrefix = "flc_"

// Ways in which an application proves itself at the token endpoint.
const (
	methodNone = "none"
	methodKey  = "private_key_jwt"
)

// client is an application.
type client struct {
	ID         string          `json:"-"`
	Host       string          `json:"-"` // of its client_id; of a registered one, that of the redirect that it asks for
	Registered bool            `json:"-"`
	Name       string          `json:"client_name,omitempty"`
	Redirects  []string        `json:"redirect_uris"`
	Method     string          `json:"token_endpoint_auth_method,omitempty"`
	KeysURL    string          `json:"jwks_uri,omitempty"`
	Keys       json.RawMessage `json:"jwks,omitempty"`
	Issued     int64           `json:"client_id_issued_at,omitempty"` // seconds since 1970, of a registered one
}

// clientHash is the form in which a grant names its application.
func clientHash(id string) string { return access.HashCode("client", id) }

// clientOf returns the application with a client_id, before it has a grant.
func (s *Server) clientOf(ctx context.Context, id string) (*client, error) {
	if sealed, ok := strings.CutPrefix(id, clientPrefix); ok {
		c, err := s.registeredClient(id, sealed)
		if err != nil {
			return nil, err
		}
		return c, nil
	}
	if !s.opt.CIMD {
		return nil, invalidClient("this server knows applications that registered alone: register at " + s.opt.Issuer + PathRegister)
	}
	u, err := url.Parse(id)
	if err != nil || u.Scheme != "https" || !isPlainHost(u) || u.Path == "" || u.Path == "/" || u.User != nil || u.Fragment != "" || strings.Contains(id, "#") || path.Clean(u.Path) != strings.TrimSuffix(u.Path, "/") || len(id) > maxMetadata {
		return nil, invalidClient("the client_id is neither a registered one nor an https URL with a path")
	}
	if !s.isAllowedHost(u.Hostname()) {
		return nil, invalidClient("applications of " + u.Hostname() + " may not ask here; an operator can allow them with --oauth-hosts")
	}
	raw, err := s.documents.get(ctx, u)
	if err != nil {
		return nil, err
	}
	var c struct {
		client
		ClientID string `json:"client_id"`
		Secret   any    `json:"client_secret"`
	}
	if err := json.Unmarshal(raw, &c); err != nil || c.ClientID != id || c.Secret != nil {
		return nil, invalidClient("the document at the client_id does not describe this application: it needs the same client_id, redirect_uris and no client_secret")
	}
	c.ID, c.Host, c.Issued, c.Name = id, u.Hostname(), 0, cleantext.Short(c.Name, maxClientName)
	if err := s.checkClient(&c.client); err != nil {
		return nil, invalidClient(err.Error())
	}
	return &c.client, nil
}

// checkClient checks the metadata of an application. The errors are sentences about it.
func (s *Server) checkClient(c *client) error {
	if len(c.Redirects) == 0 {
		return errors.New("the application has no redirect_uris")
	}
	for _, redirect := range c.Redirects {
		if _, err := parseRedirect(redirect); err != nil {
			return err
		}
	}
	switch c.Method {
	case "":
		c.Method = methodNone
	case methodNone:
	case methodKey:
		if c.KeysURL == "" && len(c.Keys) == 0 || len(c.Keys) > maxKeys {
			return errors.New("the application proves itself with a key, and names neither a jwks_uri nor jwks of at most 4 KiB")
		}
		if u, err := url.Parse(c.KeysURL); c.KeysURL != "" && (err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil) {
			return errors.New("the jwks_uri of the application is not an https URL")
		}
	default:
		return errors.New("the application wants a token_endpoint_auth_method that is neither none nor private_key_jwt")
	}
	return nil
}

// parseRedirect parses a redirect URI: https, http to this machine, or a private scheme (RFC 8252, 7.1).
func parseRedirect(text string) (*url.URL, error) {
	no := func(why string) (*url.URL, error) {
		return nil, errors.New("the redirect URI " + strconv.Quote(text) + " " + why)
	}
	u, err := url.Parse(text)
	if err != nil || len(text) > maxMetadata || !u.IsAbs() || strings.Contains(text, "#") || u.User != nil || strings.ContainsFunc(text, func(c rune) bool { return c <= ' ' || c >= 0x7f }) {
		return no("is not an absolute URI without fragment and user")
	}
	switch strings.ToLower(u.Scheme) {
	case "https":
		if !isPlainHost(u) {
			return no("has no host, or one that is not in ASCII letters")
		}
	case "http":
		if !isLoopback(u) {
			return no("uses http to another machine than the browser's own; use https")
		}
	case "javascript", "data", "file", "blob", "about", "view-source", "vbscript", "filesystem", "ws", "wss", "ftp":
		return no("has a scheme that no application can own")
	}
	return u, nil
}

// isPlainHost reports whether a URL has a host in ASCII: another one may look like a name that people trust, and browsers read some
// of its letters as dots.
func isPlainHost(u *url.URL) bool {
	return u.Hostname() != "" && !strings.ContainsFunc(u.Host, func(c rune) bool { return c <= ' ' || c >= 0x7f })
}

func isLoopback(u *url.URL) bool {
	switch u.Hostname() {
	case "localhost", "127.0.0.1", "::1":
		return true
	}
	return false
}

// isPrivate reports whether a redirect leads to whatever program of the browser's machine has the scheme, or the port.
func isPrivate(u *url.URL) bool { return u.Scheme != "https" }

// redirectOf returns the redirect of a request: one of the application, exactly; on loopback with any port (RFC 8252, 7.3).
func (s *Server) redirectOf(c *client, text string) (*url.URL, error) {
	u, err := parseRedirect(text)
	if err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(c.Redirects, func(own string) bool {
		if own == text {
			return true
		}
		o, err := url.Parse(own)
		return err == nil && o.Scheme == "http" && u.Scheme == "http" && isLoopback(u) && o.Hostname() == u.Hostname() && o.EscapedPath() == u.EscapedPath() && o.RawQuery == u.RawQuery
	}) {
		return nil, errors.New("the redirect URI " + strconv.Quote(text) + " is not one that the application has named")
	}
	if host := hostOf(u); !s.isAllowedHost(host) {
		return nil, errors.New("redirects to " + host + " are not allowed here; an operator can allow them with --oauth-hosts")
	}
	return u, nil
}

// hostOf returns what names the receiver of a redirect: its host, or the private scheme.
func hostOf(u *url.URL) string {
	if u.Scheme == "https" || u.Scheme == "http" {
		return u.Hostname()
	}
	return u.Scheme + ":"
}

// registeredClient opens the client_id of a registered application.
func (s *Server) registeredClient(id, sealed string) (*client, *refusal) {
	text, err := s.opt.Mint.OpenClientID(sealed)
	if err != nil {
		return nil, invalidClient("this client_id was not made here; register again at " + s.opt.Issuer + PathRegister)
	}
	c := &client{}
	if err := json.Unmarshal([]byte(text), c); err != nil {
		return nil, invalidClient("this client_id cannot be read; register again")
	}
	if now := clock.Now(); now.Sub(time.Unix(c.Issued, 0)) > registeredLife && !s.opt.Service.Keys().HasGrant(clientHash(id), now) {
		return nil, invalidClient("this client_id is more than a day old and was not used; register again at " + s.opt.Issuer + PathRegister)
	}
	c.ID, c.Registered = id, true
	return c, nil
}

// register implements RFC 7591: the client_id is the sealed metadata.
func (s *Server) register(w http.ResponseWriter, r *http.Request) error {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxDocument))
	c := &client{}
	if err != nil || json.Unmarshal(body, c) != nil {
		return refuse("invalid_client_metadata", "the body is not a JSON object with redirect_uris")
	}
	// A server may replace what a client asks for (RFC 7591, 2): secrets are not made.
	c.Method, c.KeysURL, c.Keys, c.Name, c.Issued = methodNone, "", nil, cleantext.Short(c.Name, maxClientName), clock.Now().Unix()
	if len(c.Redirects) > maxRedirects {
		return refuse("invalid_redirect_uri", "an application registers with at most 5 redirect_uris")
	}
	if err := s.checkClient(c); err != nil {
		return refuse("invalid_redirect_uri", err.Error())
	}
	for _, redirect := range c.Redirects {
		if _, err := s.redirectOf(c, redirect); err != nil {
			return refuse("invalid_redirect_uri", err.Error())
		}
	}
	metadata, err := json.Marshal(c)
	if err != nil || len(metadata) > maxMetadata {
		return refuse("invalid_client_metadata", "name and redirect_uris have more than 1 KiB together")
	}
	writeJSON(w, http.StatusCreated, struct {
		ID string `json:"client_id"`
		*client
		GrantTypes    []string `json:"grant_types"`
		ResponseTypes []string `json:"response_types"`
	}{clientPrefix + s.opt.Mint.ClientID(string(metadata), clock.Now()), c, []string{"authorization_code", "refresh_token"}, []string{"code"}})
	return nil
}

// documents fetches and keeps what applications publish. It is safe for concurrent use.
type documents struct {
	client *http.Client
	places chan struct{}
	rate   *rate.Limiter

	mu    sync.Mutex
	known map[string]document  // by URL
	last  map[string]time.Time // when a host was asked
}

type document struct {
	raw   []byte
	until time.Time
}

func newDocuments(c *http.Client) *documents {
	// What the limiter lets through at once and what it adds within a minute are fetchesPerMin together.
	return &documents{client: c, places: make(chan struct{}, fetchesAtOnce), rate: rate.NewLimiter(rate.Every(time.Minute/(fetchesPerMin-fetchesAtOnce)), fetchesAtOnce), known: map[string]document{}, last: map[string]time.Time{}}
}

var (
	errFetch    = invalidClient("the document of the application cannot be fetched: it must be JSON of at most 64 KiB at a public https address, without a redirect")
	errFetching = &refusal{http.StatusServiceUnavailable, "temporarily_unavailable", "too many documents of applications are being fetched; try again in some seconds"}
)

// get returns a document. Errors do not say what the target answered: it may be one that only this node reaches.
func (d *documents) get(ctx context.Context, u *url.URL) ([]byte, error) {
	raw, wait := d.begin(u)
	if raw != nil {
		return raw, nil
	}
	if wait {
		return nil, errFetching
	}
	select {
	case d.places <- struct{}{}:
		defer func() { <-d.places }()
	default:
		return nil, errFetching
	}
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, errFetch
	}
	req.Header.Set("Accept", "application/json")
	resp, err := d.client.Do(req)
	if err != nil {
		return nil, errFetch
	}
	defer resp.Body.Close()
	raw, err = io.ReadAll(io.LimitReader(resp.Body, maxDocument+1))
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if err != nil || resp.StatusCode != http.StatusOK || len(raw) > maxDocument || !json.Valid(raw) || kind != "application/json" && !strings.HasSuffix(kind, "+json") {
		return nil, errFetch
	}
	d.keep(u.String(), document{raw, clock.Now().Add(cachedFor(resp.Header))})
	return raw, nil
}

// begin returns a document that is kept, or notes that its host is asked now. wait reports that it was asked a moment ago, or that too
// many are asked.
func (d *documents) begin(u *url.URL) (raw []byte, wait bool) {
	now, host := clock.Now(), strings.TrimSuffix(strings.ToLower(u.Hostname()), ".")
	d.mu.Lock()
	defer d.mu.Unlock()
	if known, ok := d.known[u.String()]; ok && now.Before(known.until) {
		return known.raw, false
	}
	if now.Sub(d.last[host]) < fetchPause || !d.rate.AllowN(now, 1) {
		return nil, true
	}
	for other, at := range d.last {
		if now.Sub(at) >= fetchPause {
			delete(d.last, other)
		}
	}
	d.last[host] = now
	return nil, false
}

func (d *documents) keep(address string, known document) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.known) >= maxCached {
		first := ""
		for name, other := range d.known {
			if first == "" || other.until.Before(d.known[first].until) {
				first = name
			}
		}
		delete(d.known, first)
	}
	d.known[address] = known
}

// cachedFor returns how long a document is kept, by its headers (RFC 9111) within bounds.
func cachedFor(h http.Header) time.Duration {
	for directive := range strings.SplitSeq(strings.ToLower(h.Get("Cache-Control")), ",") {
		directive = strings.TrimSpace(directive)
		if directive == "no-store" || directive == "no-cache" {
			return leastCached
		}
		if seconds, ok := strings.CutPrefix(directive, "max-age="); ok {
			if n, err := strconv.Atoi(seconds); err == nil && n >= 0 {
				return min(max(time.Duration(min(n, 1<<30))*time.Second, leastCached), mostCached)
			}
		}
	}
	return usuallyCached
}
