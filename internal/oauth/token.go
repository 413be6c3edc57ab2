package oauth

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"net/http"
	"net/url"
	"strings"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
)

// grantIDLength is that of the id of a key.
const grantIDLength = 8

// tokens is an answer of the token endpoint (RFC 6749, 5.1).
type tokens struct {
	Access  string `json:"access_token"`
	Type    string `json:"token_type"`
	Expires int    `json:"expires_in"` // seconds
	Refresh string `json:"refresh_token"`
	Scope   string `json:"scope"`
}

// token implements the token endpoint.
func (s *Server) token(w http.ResponseWriter, r *http.Request) error {
	parameters, err := form(r)
	if err != nil {
		return err
	}
	var out tokens
	switch parameters.Get("grant_type") {
	case "authorization_code":
		out, err = s.redeem(r, parameters)
	case "refresh_token":
		out, err = s.refresh(r, parameters)
	default:
		err = refuse("unsupported_grant_type", "grant_type must be authorization_code or refresh_token")
	}
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func invalidGrant(text string) *refusal { return refuse("invalid_grant", text) }

// redeem exchanges an authorization code for the tokens of a new grant.
func (s *Server) redeem(r *http.Request, parameters url.Values) (tokens, error) {
	no := invalidGrant("the code is not valid: it works once, within a minute, for the application and the redirect_uri that asked for it")
	code := parameters.Get("code")
	switch err := s.opt.Mint.VerifyCode(access.CodeGrant, code, clock.Now()); { // guesses do not reach the database
	case errors.Is(err, credential.ErrExpired):
		return tokens{}, no
	case err != nil:
		return tokens{}, s.guessed(r, no)
	}
	// An application whose keys cannot be fetched now, or not be checked, tries again with the same code.
	a, err := s.opt.Service.TakeAuthorization(r.Context(), code, func(a fleet.Authorization) error {
		if a.Key.Grant == nil || parameters.Get("redirect_uri") != a.Redirect {
			return no
		}
		return s.authenticate(r.Context(), parameters, a.Key.Grant)
	})
	switch {
	case errors.Is(err, devices.ErrNotFound):
		return tokens{}, no
	case err != nil:
		return tokens{}, err
	}
	sum := sha256.Sum256([]byte(parameters.Get("code_verifier")))
	if challenge := base64.RawURLEncoding.EncodeToString(sum[:]); subtle.ConstantTimeCompare([]byte(challenge), []byte(a.Challenge)) != 1 {
		return tokens{}, invalidGrant("the code_verifier does not belong to the code_challenge of the request")
	}
	if err := s.sameResource(parameters, a.Key.Grant.Resource); err != nil {
		return tokens{}, err
	}
	var refresh string
	k, err := s.opt.Service.IssueGrant(r.Context(), s.principal(r), a.Key, func(id string) string {
		refresh = refreshToken(id, s.opt.Mint.Code(refreshPurpose(id), clock.Now().Add(access.GrantIdle)))
		return refresh
	})
	if err != nil {
		if unavailable(err) {
			return tokens{}, err
		}
		return tokens{}, invalidGrant("the key with which a person allowed this has ended: " + err.Error())
	}
	return s.tokensOf(k, refresh), nil
}

// refreshPurpose is what the code of a refresh token is signed for: one grant, so that it does nothing to another one.
func refreshPurpose(id string) string { return access.CodeRefresh + " " + id }

func refreshToken(id, code string) string { return refreshPrefix + id + "_" + code }

// tokensOf returns a new access token of a grant beside a refresh token.
func (s *Server) tokensOf(k access.Key, refresh string) tokens {
	now := clock.Now()
	return tokens{Access: access.AccessPrefix + s.opt.Mint.AccessToken(k.ID, k.Grant.Resource, now.Add(accessLife), now), Type: "Bearer", Expires: int(accessLife.Seconds()),
		Refresh: refresh, Scope: strings.Join(k.Scopes.Names(), " ")}
}

// sameResource refuses tokens for another resource than that of the grant.
func (s *Server) sameResource(parameters url.Values, granted string) error {
	if strings.Join(parameters["resource"], "") == "" {
		return nil
	}
	path, err := s.resourceOf(parameters["resource"])
	if err == nil && path != granted {
		err = refuse("invalid_target", "the person allowed "+s.opt.Issuer+granted+", not this resource")
	}
	return err
}

// splitRefresh returns the id of the grant and the code of a refresh token.
func splitRefresh(token string) (id, code string, ok bool) {
	rest, ok := strings.CutPrefix(token, refreshPrefix)
	if !ok || len(rest) <= grantIDLength || rest[grantIDLength] != '_' {
		return "", "", false
	}
	return rest[:grantIDLength], rest[grantIDLength+1:], true
}

// refresh replaces a refresh token by its successor. The same one twice gets the same successor for a while, and ends the
// grant after that: then somebody else has it (RFC 9700, 4.14).
func (s *Server) refresh(r *http.Request, parameters url.Values) (tokens, error) {
	no := invalidGrant("the refresh token is not valid: it was revoked, was unused for 90 days, or is of another application; the person must allow the application again")
	old := parameters.Get("refresh_token")
	id, code, ok := splitRefresh(old)
	if !ok {
		return tokens{}, s.guessed(r, no)
	}
	now := clock.Now()
	genuine := s.opt.Mint.VerifyCode(refreshPurpose(id), code, now)
	k, err := s.grantOf(r.Context(), id, genuine == nil, now)
	switch {
	case unavailable(err):
		return tokens{}, err
	case err != nil && errors.Is(genuine, credential.ErrInvalid):
		return tokens{}, s.guessed(r, s.unknownGrant(parameters, no))
	case err != nil:
		return tokens{}, s.unknownGrant(parameters, no)
	}
	if err := s.authenticate(r.Context(), parameters, k.Grant); err != nil {
		return tokens{}, err
	}
	if err := s.sameResource(parameters, k.Grant.Resource); err != nil {
		return tokens{}, err
	}
	who := s.principal(r)
	next := s.successors(id, code, now)[0]
	use, moved, err := s.opt.Service.RotateGrant(r.Context(), who, id, old, next, now)
	switch {
	case errors.Is(err, devices.ErrNotFound):
		return tokens{}, s.unknownGrant(parameters, no)
	case err != nil:
		return tokens{}, err
	case moved:
		return s.tokensOf(k, next), nil
	}
	return s.again(r, who, k, use, old, code, no)
}

// grantOf returns the key of a valid grant. A node that has not heard of the grant of a genuine token reads about it.
func (s *Server) grantOf(ctx context.Context, id string, genuine bool, now time.Time) (access.Key, error) {
	k, _, err := s.opt.Service.Keys().GrantOf(id, now)
	if !genuine || !errors.Is(err, access.ErrUnknownGrant) {
		return k, err
	}
	if err := s.opt.Service.CatchUp(ctx); err != nil {
		return k, err
	}
	k, _, err = s.opt.Service.Keys().GrantOf(id, now)
	return k, err
}

// unknownGrant refuses a token without a grant. An application whose client_id does not open the consent page any more learns
// that it has to register again: nobody but the person would see it there.
func (s *Server) unknownGrant(parameters url.Values, no *refusal) *refusal {
	id := parameters.Get("client_id")
	if sealed, registered := strings.CutPrefix(id, clientPrefix); registered {
		if _, err := s.registeredClient(id, sealed); err != nil {
			return err
		}
	}
	return no
}

// successors returns the refresh token that follows one at a time, and the one that followed it under the previous secret of the
// fleet. The end of a token is part of it, so it is the same for the same time alone.
func (s *Server) successors(id, code string, at time.Time) []string {
	codes := s.opt.Mint.Successors(refreshPurpose(id), code, at.Add(access.GrantIdle), clock.Now())
	for i := range codes {
		codes[i] = refreshToken(id, codes[i])
	}
	return codes
}

// again answers a refresh token that is not valid any more.
func (s *Server) again(r *http.Request, who access.Principal, k access.Key, use access.GrantUse, old, code string, no *refusal) (tokens, error) {
	hash := func(token string) string { return access.HashCode(access.CodeRefresh, token) }
	if use.Previous == hash(old) && clock.Now().Sub(use.Rotated) < successorLife {
		for _, next := range s.successors(k.ID, code, use.Rotated) {
			if hash(next) == use.Refresh {
				return s.tokensOf(k, next), nil
			}
		}
		return tokens{}, errors.New("the fleet's secret was replaced without a grace between two uses of a refresh token")
	}
	if clock.Now().Sub(use.Used) >= access.GrantIdle {
		return tokens{}, no
	}
	// A token that was made here once: its signature says so, whatever has followed it.
	if err := s.opt.Mint.VerifyCode(refreshPurpose(k.ID), code, clock.Now()); errors.Is(err, credential.ErrInvalid) && use.Previous != hash(old) {
		return tokens{}, s.guessed(r, no)
	}
	if err := s.opt.Service.EndGrant(r.Context(), who, k.ID, "a refresh token was used again"); err != nil {
		return tokens{}, err
	}
	return tokens{}, no
}

// revoke implements RFC 7009: a token of either kind ends its grant.
func (s *Server) revoke(w http.ResponseWriter, r *http.Request) error {
	parameters, err := form(r)
	if err != nil {
		return err
	}
	token := parameters.Get("token")
	id, code, ok := splitRefresh(token)
	if ok {
		ok = !errors.Is(s.opt.Mint.VerifyCode(refreshPurpose(id), code, clock.Now()), credential.ErrInvalid)
	} else if id, _, err = s.opt.Mint.OpenAccessToken(strings.TrimPrefix(token, access.AccessPrefix), clock.Now()); err == nil || errors.Is(err, credential.ErrExpired) {
		ok = true
	}
	k, err := s.grantOf(r.Context(), id, ok, clock.Now())
	switch {
	case unavailable(err):
		return err
	case ok && err == nil:
		if err := s.authenticate(r.Context(), parameters, k.Grant); err != nil {
			return err
		}
		if err := s.opt.Service.EndGrant(r.Context(), s.principal(r), id, "the application revoked it"); err != nil {
			return err
		}
	}
	w.WriteHeader(http.StatusOK) // whether there was such a token or not (RFC 7009, 2.2)
	return nil
}

// guessed counts a credential that was never genuine.
func (s *Server) guessed(r *http.Request, no *refusal) *refusal {
	if s.opt.Failures.FailedRequest(r) {
		return &refusal{http.StatusTooManyRequests, "slow_down", "too many wrong codes and tokens from this address; try again later"}
	}
	return no
}
