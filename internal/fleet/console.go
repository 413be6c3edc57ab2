package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
)

// Codes stores one-time codes. Errors wrap devices.ErrDatabase.
type Codes interface {
	// SaveCode stores the hash of a code, and what it gives. devices.ErrConflict means that it is stored already.
	SaveCode(ctx context.Context, hash string, document []byte, expires time.Time) error
	// ReadCode returns what a code gives, or devices.ErrNotFound as TakeCode does, and leaves the code as it is.
	ReadCode(ctx context.Context, hash string, now time.Time) (document []byte, err error)
	// TakeCode deletes a code and returns what it gives, or devices.ErrNotFound if there
	// is none or it has expired. Of several callers, on any nodes, one receives it.
	TakeCode(ctx context.Context, hash string, now time.Time) (document []byte, err error)
}

// ActionConsoleLogin is the action of a login by code in the audit log.
const ActionConsoleLogin = "console_login"

// ErrConsoleCode is the refusal of a wrong, used or expired code.
var ErrConsoleCode = devices.Errorf(devices.CodeUnauthorized, "the code is not valid: it works once, within a minute; `fleetd console` prints another one")

func (s *Service) saveCode(ctx context.Context, purpose string, code string, value any, expires time.Time) error {
	document, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("encode what a code gives: %w", err)
	}
	return s.ports.Codes.SaveCode(ctx, access.HashCode(purpose, code), document, expires)
}

func (s *Service) takeCode(ctx context.Context, purpose string, code string, value any) error {
	document, err := s.ports.Codes.TakeCode(ctx, access.HashCode(purpose, code), clock.Now())
	if err != nil {
		return err
	}
	return decodeCode(document, value)
}

func decodeCode(document []byte, value any) error {
	if err := json.Unmarshal(document, value); err != nil {
		return fmt.Errorf("a stored code is invalid: %.100q: %w", document, err)
	}
	return nil
}

// SaveConsoleCode stores a new code that RedeemConsoleCode exchanges for a console key of the
// caller, once, on any node, until it expires. No scopes means all scopes of the caller.
func (s *Service) SaveConsoleCode(ctx context.Context, principal access.Principal, scopes access.Scopes, code string, expires time.Time) error {
	k, err := s.Keys().ConsoleKey(principal.Caller, scopes, clock.Now())
	if err != nil {
		err = devices.Errorf(devices.CodeBadRequest, "%v", err)
	} else {
		err = s.saveCode(ctx, access.CodeConsole, code, k, expires)
	}
	s.auditChange(principal, audit.KindKey, "console_code", "", "", err)
	return err
}

// RedeemConsoleCode exchanges a code for a new console key with its token. who has no caller
// yet. A wrong, used or expired code is CodeUnauthorized.
func (s *Service) RedeemConsoleCode(ctx context.Context, who access.Principal, code string) (k access.Key, token string, err error) {
	err = s.takeCode(ctx, access.CodeConsole, code, &k)
	if err == nil {
		k, token, err = s.issue(ctx, k)
	} else if errors.Is(err, devices.ErrNotFound) {
		err = ErrConsoleCode
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

// issue completes a child of a key, and adds it to the fleet. If the parent has ended, the error is CodeUnauthorized.
func (s *Service) issue(ctx context.Context, k access.Key) (_ access.Key, token string, err error) {
	if k, token, err = s.Keys().Issue(k, clock.Now()); err != nil {
		return access.Key{}, "", devices.Errorf(devices.CodeUnauthorized, "%v", err)
	}
	defer s.Keys().Issued(k)
	return k, token, s.registry.SaveKey(ctx, k.Parent.Key, k)
}
