package restapi

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/clock"
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
	register(s, s.operation(http.MethodPost, "/v1/console/codes", about{id: "createConsoleCode", anyone: true, tag: tagAccess, summary: "Make a one-time code of the console",
		text: "What `fleetd console` does. The code is exchanged for a key of the console, which has the caller's rights or fewer, acts in its name, and ends with it. " +
			"With `for` `consent`, what `fleetd keys allow` does: a person enters the code to let an application use MCP.",
		status: http.StatusCreated, answer: "The code, for /console/#code=CODE.", codes: []devices.Code{devices.CodeNotFound, devices.CodeUnavailable}}), s.createConsoleCode)
	login := s.operation(http.MethodPost, pathConsoleKeys, about{id: "createConsoleKey", public: true, tag: tagAccess, summary: "Exchange a one-time code for a key",
		text: "Once, within a minute, on any node. The key ends after 12 h, or with the key that made the code. Wrong codes are delayed like wrong tokens.", status: http.StatusCreated,
		answer: "The key with its token, which is shown this once.", codes: []devices.Code{devices.CodeNotFound, devices.CodeForbidden, devices.CodeUnavailable}})
	login.MaxBodyBytes = maxCodeBody
	login.Middlewares = huma.Middlewares{func(ctx huma.Context, next func(huma.Context)) {
		if r, w := humago.Unwrap(ctx); s.admitConsole(w, r) {
			next(ctx)
		}
	}}
	register(s, login, s.createConsoleKey)
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
	if in.Body != nil && in.Body.For == access.CodeConsent {
		return s.createConsentCode(ctx, in.Body, scopes)
	}
	if in.Body != nil && (!in.Body.Devices.IsZero() || len(in.Body.Tools) > 0) {
		return nil, badRequest("devices and tools narrow a consent alone: add \"for\":\"consent\", or make a key with them for the console (POST /v1/keys)")
	}
	if s.opt.Console == nil {
		return nil, errConsoleOff
	}
	expires := clock.Now().Add(access.ConsoleCodeLife).Truncate(time.Second)
	code := s.opt.Mint.Code(access.CodeConsole, expires)
	if err := s.opt.Service.SaveConsoleCode(ctx, caller(ctx), scopes, code, expires); err != nil {
		return nil, err
	}
	return newSecret(api.ConsoleCode{Code: code, Expires: expires}), nil
}

// createConsentCode makes a code with which a person consents to an application.
func (s *Server) createConsentCode(ctx context.Context, body *api.NewConsoleCode, scopes access.Scopes) (*secret[api.ConsoleCode], error) {
	most := fleet.Consent{Scopes: scopes, Tools: body.Tools}
	if !body.Devices.IsZero() {
		if err := json.Unmarshal(body.Devices.JSON, &most.Devices); err != nil {
			return nil, badRequest("devices: " + err.Error())
		}
	}
	expires := clock.Now().Add(access.ConsentCodeLife).Truncate(time.Second)
	code := s.opt.Mint.Code(access.CodeConsent, expires)
	if err := s.opt.Service.SaveConsentCode(ctx, caller(ctx), most, code, expires); err != nil {
		return nil, err
	}
	return newSecret(api.ConsoleCode{Code: code, Expires: expires}), nil
}

func (s *Server) createConsoleKey(ctx context.Context, in *struct{ Body api.ConsoleLogin }) (*secret[api.CreatedKey], error) {
	r, w := requestOf(ctx)
	var k access.Key
	var token string
	who := access.Principal{Via: access.ViaREST, From: s.opt.Failures.Client(r)}
	err := s.opt.Mint.VerifyCode(access.CodeConsole, in.Body.Code, clock.Now())
	if err != nil { // guesses do not reach the database
		err = fleet.ErrConsoleCode
		s.opt.Service.NoteRefusal(who, fleet.ActionConsoleLogin, "", err)
	} else {
		k, token, err = s.opt.Service.RedeemConsoleCode(ctx, who, in.Body.Code)
	}
	if err != nil {
		p := s.problem(ctx, err)
		if p.Code == string(devices.CodeUnauthorized) && s.opt.Failures.FailedRequest(r) {
			p = tooManyFailures()
		}
		w.Header().Set("Connection", "close") // as after a wrong token
		return nil, p
	}
	return newSecret(api.CreatedKey{Key: s.newAPIKey(k, clock.Now()), Token: token}), nil
}

var errConsoleOff = &devices.Error{Code: devices.CodeNotFound, Detail: "the console of this node is switched off; start the node without --console=false"}
