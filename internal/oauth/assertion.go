package oauth

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"net/url"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
)

const (
	// assertionType is client_assertion_type of RFC 7523, section 2.2.
	assertionType = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
	// maxAssertion is how long an assertion may be valid, and assertionSkew by how much clocks may differ.
	maxAssertion  = 5 * time.Minute
	assertionSkew = 30 * time.Second
	maxJTI        = 256 // bytes
)

var algorithms = []jose.SignatureAlgorithm{jose.RS256, jose.ES256}

// authenticate checks that a request to the token endpoint is of the application that has a grant, and has proved itself as
// its metadata said at the consent. Nothing is fetched for an application without keys.
func (s *Server) authenticate(ctx context.Context, parameters url.Values, g *access.Grant) error {
	assertion := parameters.Get("client_assertion")
	id := cmp.Or(parameters.Get("client_id"), subjectOf(assertion)) // RFC 7521, 4.2: the assertion names it
	switch {
	case id == "":
		return invalidClient("the request has no client_id")
	case clientHash(id) != g.Client:
		return invalidGrant("this was allowed to another application")
	case g.KeysURL == "" && len(g.Keys) == 0:
		return nil
	case parameters.Get("client_assertion_type") != assertionType || assertion == "":
		return invalidClient("this application proves itself with private_key_jwt: the request needs client_assertion and client_assertion_type")
	}
	return s.verifyAssertion(ctx, id, g, assertion)
}

// subjectOf returns the subject of an assertion that is not verified yet; empty without one.
func subjectOf(assertion string) string {
	token, err := jwt.ParseSigned(assertion, algorithms)
	if err != nil {
		return ""
	}
	var claims jwt.Claims
	if err := token.UnsafeClaimsWithoutVerification(&claims); err != nil {
		return ""
	}
	return claims.Subject
}

// verifyAssertion checks a client_assertion (RFC 7523, section 3).
func (s *Server) verifyAssertion(ctx context.Context, id string, g *access.Grant, assertion string) error {
	no := invalidClient("the client_assertion is not valid: it needs a signature of the application's keys with RS256 or ES256, iss and sub that are the client_id, aud " + s.opt.Issuer + ", exp within 5 minutes, and a new jti")
	token, err := jwt.ParseSigned(assertion, algorithms)
	if err != nil {
		return no
	}
	keys, err := s.keysOf(ctx, g)
	if err != nil {
		return err
	}
	var claims jwt.Claims
	verified := false
	for _, key := range keys.Keys {
		if !key.IsPublic() || token.Headers[0].KeyID != "" && key.KeyID != "" && key.KeyID != token.Headers[0].KeyID {
			continue
		}
		if token.Claims(key.Key, &claims) == nil {
			verified = true
			break
		}
	}
	now := clock.Now()
	if !verified || claims.Issuer != id || claims.Subject != id || !claims.Audience.Contains(s.opt.Issuer) && !claims.Audience.Contains(s.opt.Issuer+PathToken) ||
		claims.ValidateWithLeeway(jwt.Expected{Time: now}, assertionSkew) != nil || claims.Expiry == nil || claims.Expiry.Time().After(now.Add(maxAssertion+assertionSkew)) ||
		claims.ID == "" || len(claims.ID) > maxJTI {
		return no
	}
	// The name is kept for as long as the assertion could be used again.
	err = s.opt.Service.Once(ctx, "assertion", id+" "+claims.ID, claims.Expiry.Time().Add(2*assertionSkew))
	if errors.Is(err, devices.ErrConflict) {
		return no
	}
	return err
}

// keysOf returns the public keys of an application.
func (s *Server) keysOf(ctx context.Context, g *access.Grant) (keys jose.JSONWebKeySet, err error) {
	raw := []byte(g.Keys)
	if g.KeysURL != "" {
		u, err := url.Parse(g.KeysURL)
		if err != nil { // checkClient has parsed it
			return keys, err
		}
		if raw, err = s.documents.get(ctx, u); err != nil { // it passes: an application that is told invalid_client forgets its grant
			return keys, errFetching
		}
	}
	if err := json.Unmarshal(raw, &keys); err != nil {
		return keys, invalidClient("the keys of the application cannot be read")
	}
	return keys, nil
}
