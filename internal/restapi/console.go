package restapi

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
)

const pathConsole = "/console/"

// isConsole reports whether a request is one for the console's files, which need no token.
func isConsole(r *http.Request) bool {
	return strings.HasPrefix(r.URL.Path, pathConsole) && (r.Method == http.MethodGet || r.Method == http.MethodHead)
}

// pathConsoleKeys needs no token: the code is what the caller presents.
const pathConsoleKeys = "/v1/console/keys"

const maxCodeBody = 1 << 10 // bytes

type createCodeInput struct{ Body *api.NewConsoleCode }

func (s *Server) consoleRoutes() {
	huma.Register(s.api, s.operation(http.MethodPost, "/v1/console/codes", about{id: "createConsoleCode", anyone: true, tag: tagAccess, summary: "Make a one-time code of the console",
		text:   "What `fleetd console` does. The code is exchanged for a key of the console, which has the caller's rights or fewer, acts in its name, and ends with it.",
		status: http.StatusCreated, answer: "The code, for /console/#code=CODE.", codes: []devices.Code{devices.CodeNotFound, devices.CodeUnavailable}}), s.createConsoleCode)
	login := withAnswer(s.operation(http.MethodPost, pathConsoleKeys, about{id: "createConsoleKey", public: true, tag: tagAccess, summary: "Exchange a one-time code for a key",
		text: "Once, within a minute, on any node. The key ends after 12 h, or with the key that made the code. Wrong codes are delayed like wrong tokens.", status: http.StatusCreated,
		answer: "The key with its token, which is shown this once.", codes: []devices.Code{devices.CodeNotFound, devices.CodeForbidden, devices.CodeUnavailable}}), valueJSON[0], schemaOf[api.CreatedKey](s))
	login.RequestBody = s.jsonBody(schemaOf[api.ConsoleLogin](s), true)
	s.handle(login, s.createConsoleKey)
	s.mux.HandleFunc("GET "+pathConsole, s.console)
	s.HandlePublic("GET "+strings.TrimSuffix(pathConsole, "/"), http.RedirectHandler(pathConsole, http.StatusFound))
}

// admitConsole answers a request for the console that has no token itself if it is to be refused. Where no token is
// required, another site's page must not be able to reach the console under its own name, like the rest of the API.
func (s *Server) admitConsole(w http.ResponseWriter, r *http.Request) bool {
	if s.opt.AuthNone {
		if p := s.admitLocal(r); p != nil {
			p.write(w)
			return false
		}
	}
	if s.opt.Console == nil {
		s.fail(w, r, errConsoleOff)
	}
	return s.opt.Console != nil
}

// console serves the files of the console.
func (s *Server) console(w http.ResponseWriter, r *http.Request) {
	if !s.admitConsole(w, r) {
		return
	}
	s.opt.Console.ServeHTTP(w, r)
}

func (s *Server) createConsoleCode(ctx context.Context, in *createCodeInput) (*secret[api.ConsoleCode], error) {
	var scopes access.Scopes
	if in.Body != nil && in.Body.Scopes != nil {
		var err error
		if scopes, err = access.ParseScopes(in.Body.Scopes); err != nil {
			return nil, badRequest(err.Error())
		}
	}
	if s.opt.Console == nil {
		return nil, s.problem(ctx, errConsoleOff)
	}
	expires := time.Now().Add(access.ConsoleCodeLife).UTC().Truncate(time.Second)
	code := s.opt.Mint.ConsoleCode(expires)
	if err := s.opt.Service.SaveConsoleCode(ctx, caller(ctx), scopes, code, expires); err != nil {
		return nil, s.problem(ctx, err)
	}
	return newSecret(api.ConsoleCode{Code: code, Expires: expires}), nil
}

func (s *Server) createConsoleKey(w http.ResponseWriter, r *http.Request) {
	if !s.admitConsole(w, r) {
		return
	}
	var in api.ConsoleLogin
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxCodeBody))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&in); err != nil {
		s.fail(w, r, badRequest(`the body must be {"code":"..."}: `+err.Error()))
		return
	}
	var k access.Key
	var token string
	who := access.Principal{Via: access.ViaREST, From: s.opt.Failures.Client(r)}
	err := s.opt.Mint.VerifyConsoleCode(in.Code, time.Now())
	if err != nil { // guesses do not reach the database
		err = fleet.ErrConsoleCode
		s.opt.Service.NoteRefusal(who, fleet.ActionConsoleLogin, "", err)
	} else {
		k, token, err = s.opt.Service.RedeemConsoleCode(r.Context(), who, in.Code)
	}
	if err != nil {
		p := s.problem(r.Context(), err)
		if p.Code == devices.CodeUnauthorized && s.opt.Failures.FailedRequest(r) {
			p = tooManyFailures()
		}
		w.Header().Set("Connection", "close") // as after a wrong token
		p.write(w)
		return
	}
	w.Header()["Content-Type"] = valueJSON
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusCreated)
	_ = marshal(w, api.CreatedKey{Key: s.newAPIKey(k, time.Now()), Token: token}) // reports no write that fails
}

var errConsoleOff = &devices.Error{Code: devices.CodeNotFound, Detail: "the console of this node is switched off; start the node without --console=false"}
