package fleet

import (
	"context"
	"errors"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
)

// ConsoleCodes stores the one-time codes of the console. Errors wrap devices.ErrDatabase.
type ConsoleCodes interface {
	// SaveConsoleCode stores the hash of a code, and the key that it gives.
	SaveConsoleCode(ctx context.Context, hash string, k access.Key, expires time.Time) error
	// TakeConsoleCode deletes a code and returns its key, or devices.ErrNotFound if there
	// is none or it has expired. Of several callers, on any nodes, one receives it.
	TakeConsoleCode(ctx context.Context, hash string, now time.Time) (access.Key, error)
}

// ActionConsoleLogin is the action of a login by code in the audit log.
const ActionConsoleLogin = "console_login"

// ErrConsoleCode is the refusal of a wrong, used or expired code.
var ErrConsoleCode = devices.Errorf(devices.CodeUnauthorized, "the code is not valid: it works once, within a minute; `fleetd console` prints another one")

// SaveConsoleCode stores a new code that RedeemConsoleCode exchanges for a console key of the
// caller, once, on any node, until it expires. No scopes means all scopes of the caller.
func (s *Service) SaveConsoleCode(ctx context.Context, principal access.Principal, scopes access.Scopes, code string, expires time.Time) error {
	k, err := s.Keys().ConsoleKey(principal.Caller, scopes, clock.Now())
	if err != nil {
		err = devices.Errorf(devices.CodeBadRequest, "%v", err)
	} else {
		err = s.ports.Codes.SaveConsoleCode(ctx, access.HashConsoleCode(code), k, expires)
	}
	s.auditChange(principal, audit.KindKey, "console_code", "", "", err)
	return err
}

// RedeemConsoleCode exchanges a code for a new console key with its token. who has no caller
// yet. A wrong, used or expired code is CodeUnauthorized.
func (s *Service) RedeemConsoleCode(ctx context.Context, who access.Principal, code string) (k access.Key, token string, err error) {
	k, err = s.ports.Codes.TakeConsoleCode(ctx, access.HashConsoleCode(code), clock.Now())
	if err == nil {
		if k, token, err = s.Keys().Issue(k, clock.Now()); err != nil {
			err = devices.Errorf(devices.CodeUnauthorized, "%v", err)
		} else {
			defer s.Keys().Issued(k)
		}
	} else if errors.Is(err, devices.ErrNotFound) {
		err = ErrConsoleCode
	}
	if err == nil {
		err = s.registry.SaveKey(ctx, k.Parent.Key, k)
	}
	if err != nil {
		s.NoteRefusal(who, ActionConsoleLogin, "", err)
		return access.Key{}, "", err
	}
	if caller, ok := s.Keys().Caller(k.ID); ok {
		who.Caller = caller
	}
	s.auditChange(who, audit.KindKey, ActionConsoleLogin, "", k.ID+" "+k.Name, nil)
	return k, token, nil
}
