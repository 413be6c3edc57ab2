package oauth

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
	"fleetd/internal/mcpserver"
	"fleetd/internal/selector"
)

//go:embed page.html
var pageText string

//go:embed page.css
var pageStyle string

var page = template.Must(template.New("page").Parse(pageText))

// pagePolicy is the policy of the page. It has no form-action: browsers would apply it to the redirect that answers the
// form, and a redirect may go to a program of the browser's machine.
var pagePolicy = func() string {
	sum := sha256.Sum256([]byte(pageStyle))
	return "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'; frame-ancestors 'none'; base-uri 'none'"
}()

// view is what the page shows.
type view struct {
	Style    template.CSS
	Error    string // in place of the form if Form is false
	Form     bool
	Host     string
	Verified bool
	Name     string
	To       string // where the browser goes next
	Private  bool   // to a program of the browser's machine
	Resource string
	Scopes   []scopeChoice
	Devices  string
	Tools    string
}

// scopeChoice is a right that a person may leave out.
type scopeChoice struct {
	Name, Words string
	Chosen      bool
}

// scopeWords says what a scope opens, to a person who knows neither.
var scopeWords = map[access.Scope]string{
	access.ScopeRead:     "see the devices, their names, labels and tools",
	access.ScopeCall:     "use the tools of the devices that are meant for language models",
	access.ScopeUser:     "use every tool, also those that devices keep for people, such as restarts",
	access.ScopePhotos:   "see photos and screenshots",
	access.ScopeEvents:   "read what happens, as it happens",
	access.ScopeJobsRead: "see jobs",
	access.ScopeJobs:     "start and stop jobs on many devices",
}

// defaultScopes are asked for by an application that names none.
var defaultScopes = []access.Scope{access.ScopeRead, access.ScopeCall}

// asked is a checked authorization request (RFC 6749, 4.1.1).
type asked struct {
	client    *client
	redirect  *url.URL
	state     string
	challenge string
	resource  string
	scopes    []string
}

// authorize shows the consent page, and takes its form. Errors are shown on the page: a redirect that nobody confirmed would
// send the browser wherever a link says.
func (s *Server) authorize(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Security-Policy", pagePolicy)
	h.Set("Referrer-Policy", "same-origin")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Permissions-Policy", "camera=(), microphone=(), geolocation=()")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	if r.Method != http.MethodGet && r.Method != http.MethodPost {
		h.Set("Allow", "GET, POST")
		s.show(w, http.StatusMethodNotAllowed, view{Error: "This page takes GET and POST."})
		return
	}
	a, err := s.check(r)
	if err != nil {
		s.show(w, statusOf(err), view{Error: err.Error()})
		return
	}
	v := s.viewOf(a)
	if r.Method == http.MethodGet {
		s.show(w, http.StatusOK, v)
		return
	}
	if !s.isOwnForm(r) {
		s.show(w, http.StatusForbidden, view{Error: "This form was sent from another page. Begin again in the application."})
		return
	}
	if err := r.ParseForm(); err != nil {
		s.show(w, http.StatusBadRequest, view{Error: "The form is too large. Begin again in the application."})
		return
	}
	if r.PostForm.Get("decision") != "allow" {
		s.redirect(w, r, a, url.Values{"error": {"access_denied"}})
		return
	}
	code, status, err := s.consent(r, a, &v)
	if err != nil {
		v.Error = err.Error()
		s.show(w, status, v)
		return
	}
	s.redirect(w, r, a, url.Values{"code": {code}})
}

// redirect sends the browser back to the application (RFC 6749, 4.1.2; RFC 9207).
func (s *Server) redirect(w http.ResponseWriter, r *http.Request, a *asked, answer url.Values) {
	to := *a.redirect
	if a.state != "" {
		answer.Set("state", a.state)
	}
	answer.Set("iss", s.opt.Issuer)
	to.RawQuery = strings.TrimPrefix(to.RawQuery+"&"+answer.Encode(), "&") // what it has stays as it is
	w.Header().Set("Location", to.String())
	w.WriteHeader(http.StatusSeeOther)
}

func statusOf(err error) int {
	if no, ok := errors.AsType[*refusal](err); ok {
		return no.status
	}
	return http.StatusBadRequest
}

// check returns the request of an application, or a sentence about what is wrong with it.
func (s *Server) check(r *http.Request) (*asked, error) {
	query := r.URL.Query()
	if name, found := repeated(query); found {
		return nil, fmt.Errorf("the application sent the parameter %q more than once", name)
	}
	c, err := s.clientOf(r.Context(), query.Get("client_id"))
	if err != nil {
		return nil, err
	}
	a := &asked{client: c, state: query.Get("state"), challenge: query.Get("code_challenge")}
	if a.redirect, err = s.redirectOf(c, query.Get("redirect_uri")); err != nil {
		return nil, err
	}
	if c.Registered {
		c.Host = hostOf(a.redirect)
	}
	switch raw, err := base64.RawURLEncoding.DecodeString(a.challenge); {
	case query.Get("response_type") != "code":
		return nil, errors.New("the application must ask with response_type=code")
	case query.Get("code_challenge_method") != "S256" || err != nil || len(raw) != sha256.Size:
		return nil, errors.New("the application must send a code_challenge with code_challenge_method=S256")
	case len(a.state) > maxMetadata:
		return nil, errors.New("the state of the application has more than 1 KiB")
	}
	if a.resource, err = s.resourceOf(query["resource"]); err != nil {
		return nil, err
	}
	for _, name := range strings.Fields(query.Get("scope")) {
		if slices.Contains(access.GrantScopes.Names(), name) { // others, as offline_access, open nothing
			a.scopes = append(a.scopes, name)
		}
	}
	if len(a.scopes) == 0 {
		a.scopes = devices.Texts(defaultScopes)
	}
	return a, nil
}

func (s *Server) viewOf(a *asked) view {
	v := view{Form: true, Host: a.client.Host, Verified: !a.client.Registered, Name: a.client.Name, To: a.redirect.Scheme + "://" + a.redirect.Host, Private: isPrivate(a.redirect)}
	if device, one := strings.CutPrefix(a.resource, mcpserver.PathDevices); one {
		v.Resource = device
	}
	for _, name := range access.GrantScopes.Names() {
		if slices.Contains(a.scopes, name) {
			v.Scopes = append(v.Scopes, scopeChoice{name, scopeWords[access.Scope(name)], true})
		}
	}
	return v
}

// isOwnForm reports whether a browser sent the form from this page: by Sec-Fetch-Site, which no page can set, or by Origin in
// browsers that do not have it.
func (s *Server) isOwnForm(r *http.Request) bool {
	if site := r.Header.Get("Sec-Fetch-Site"); site != "" {
		return site == "same-origin"
	}
	return r.Header.Get("Origin") == s.opt.Issuer
}

// consent allows the application what the person has chosen, and returns the authorization code. The error is a sentence for
// the person; v is filled with what was entered.
func (s *Server) consent(r *http.Request, a *asked, v *view) (code string, status int, err error) {
	entered := r.PostForm
	v.Devices, v.Tools = entered.Get("devices"), entered.Get("tools")
	var chosen []string
	for i := range v.Scopes {
		v.Scopes[i].Chosen = slices.Contains(entered["scope"], v.Scopes[i].Name)
		if v.Scopes[i].Chosen {
			chosen = append(chosen, v.Scopes[i].Name)
		}
	}
	if len(chosen) == 0 {
		return "", http.StatusBadRequest, errors.New("choose at least one right, or refuse")
	}
	c := fleet.Consent{Tools: strings.FieldsFunc(v.Tools, func(c rune) bool { return c == ',' || c == ' ' || c == '\n' || c == '\r' })}
	if c.Scopes, err = access.ParseScopes(chosen); err != nil {
		return "", http.StatusBadRequest, err
	}
	if v.Devices != "" {
		if c.Devices, err = selector.Parse(v.Devices); err != nil {
			return "", http.StatusBadRequest, fmt.Errorf("devices: %w", err)
		}
	}
	who := s.principal(r)
	if who.Caller, status, err = s.whoConsents(r, strings.TrimSpace(entered.Get("secret")), &c); err != nil {
		s.opt.Service.NoteRefusal(who, fleet.ActionConsent, "", err)
		return "", status, err
	}
	g := access.Grant{Host: a.client.Host, Name: a.client.Name, Client: clientHash(a.client.ID), Registered: a.client.Registered, Resource: a.resource}
	if a.client.Method == methodKey {
		if g.KeysURL = a.client.KeysURL; g.KeysURL == "" {
			g.Keys = json.RawMessage(a.client.Keys)
		}
	}
	expires := clock.Now().Add(codeLife)
	code = s.opt.Mint.Code(access.CodeGrant, expires)
	err = s.opt.Service.Allow(r.Context(), who, g, c, fleet.Authorization{Redirect: r.URL.Query().Get("redirect_uri"), Challenge: a.challenge}, code, expires)
	if err != nil {
		status, err = sentenceOf(err)
		return "", status, err
	}
	return code, 0, nil
}

// sentenceOf returns an error of the fleet as the page shows it.
func sentenceOf(err error) (status int, sentence error) {
	e := devices.AsError(err)
	status, _ = e.Code.Status()
	return status, errors.New(e.Detail)
}

// whoConsents returns the caller of the key or the consent code that a person entered. A code narrows the scopes: whoever made
// it has said how far it goes, and it works once.
func (s *Server) whoConsents(r *http.Request, secret string, c *fleet.Consent) (*access.Caller, int, error) {
	now := clock.Now()
	notConsent := s.opt.Mint.VerifyCode(access.CodeConsent, secret, now)
	switch {
	case secret == "":
		return nil, http.StatusBadRequest, errors.New("enter an API key or a consent code; `fleetd keys allow` prints a code")
	case s.opt.Auth.IsAdmin(secret):
		return nil, http.StatusBadRequest, errors.New("the admin token is not taken here, since it opens everything; run `fleetd keys allow`, and enter the code that it prints")
	case s.opt.Mint.VerifyCode(access.CodeConsole, secret, now) == nil:
		return nil, http.StatusBadRequest, errors.New("this is a code for the console; run `fleetd keys allow`, and enter the code that it prints")
	case notConsent == nil:
		who, err := s.opt.Service.TakeConsentCode(r.Context(), secret)
		if err != nil {
			status, err := sentenceOf(err)
			return nil, status, err
		}
		if c.Scopes = who.Scopes.Both(c.Scopes); c.Scopes == 0 {
			return nil, http.StatusBadRequest, errors.New("the code allows none of these rights; choose another one, and make another code")
		}
		return who, 0, nil
	case errors.Is(notConsent, credential.ErrExpired):
		return nil, http.StatusUnauthorized, errors.New("the code has expired; run `fleetd keys allow` again")
	}
	who, err := s.opt.Auth.Keys.Authenticate(secret, now)
	if err == nil {
		return who, 0, nil
	}
	if errors.Is(err, access.ErrToken) && s.opt.Failures.FailedRequest(r) {
		return nil, http.StatusTooManyRequests, errors.New("too many wrong keys from this address; try again later")
	}
	return nil, http.StatusUnauthorized, fmt.Errorf("%w; `fleetd keys allow` prints a code that can be entered in place of a key", err)
}

// show writes the page.
func (s *Server) show(w http.ResponseWriter, status int, v view) {
	v.Style = template.CSS(pageStyle)
	if v.Error != "" {
		v.Error = strings.ToUpper(v.Error[:1]) + v.Error[1:]
	}
	var out bytes.Buffer
	if err := page.Execute(&out, v); err != nil { // a mistake in the template, found by any test of the page
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	if status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "5")
	}
	w.WriteHeader(status)
	_, _ = w.Write(out.Bytes()) // fails only if the client has disconnected
}
