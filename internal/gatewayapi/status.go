package gatewayapi

import (
	"context"
	"errors"
	"net/http"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

var errNoList = errors.New(textNoList)

// parseStatus returns the array of client ids: `clientIds` as the gateway's
// code has it, else `deviceIds` as in its README.
func parseStatus(body []byte) (list []byte, err error) {
	var clients, described []byte
	err = members(body, func(key string, value []byte) {
		switch key {
		case "clientIds":
			clients = value
		case "deviceIds":
			described = value
		}
	})
	if err != nil {
		return nil, err
	}
	list = clients
	if kind := jsonspan.KindOf(clients); kind == jsonspan.KindNone || kind == jsonspan.KindNull {
		list = described
	}
	if jsonspan.KindOf(list) != jsonspan.KindArray {
		return nil, errNoList
	}
	return list, nil
}

// status reports for each client id whether its device is connected (exists) and
// whether a conversation is open (isAlive). The body limit limits their
// number. Devices of this node are known from memory; looking for others
// ends with the request's time, after which they count as not connected.
func (s *Server) status(x *exchange) {
	if err := s.opt.Service.Permit(context.Background(), x.by, access.ScopeRead, ""); err != nil {
		e := devices.AsError(err)
		status, _ := e.Code.Status()
		x.refuse(status, e.Code, e.Detail)
		s.opt.Service.NoteRefusal(x.by, "status", "", err)
		return
	}
	body, ok := x.read(x.refuse)
	if !ok {
		return
	}
	list, err := parseStatus(body)
	switch {
	case errors.Is(err, errNoList):
		x.refuse(http.StatusBadRequest, devices.CodeBadRequest, textNoList)
		return
	case err != nil:
		x.refuse(http.StatusBadRequest, devices.CodeBadRequest, badBody(err))
		return
	}
	ctx, cancel := context.WithTimeout(x.r.Context(), s.opt.Timeout)
	defer cancel()
	out := []byte{'{'}
	seen := map[string]bool{}
	elements := jsonspan.Array(list)
	for elements.Next() {
		clientID, isText := jsonspan.String(elements.Value())
		if !isText {
			clientID = string(elements.Value()) // names no device; is answered under its own text
		}
		if seen[clientID] {
			continue
		}
		seen[clientID] = true
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(appendString(out, clientID), ':')
		out = append(out, s.presence(ctx, x, clientID)...)
	}
	x.status, x.code, x.body = http.StatusOK, CodeOK, append(out, '}')
}

// presence describes one device. isAlive is null for a connected device
// without a conversation, where JavaScript's `&&` leaves the missing object;
// strict callers get what it means. A device that the caller may not see is not
// there.
func (s *Server) presence(ctx context.Context, x *exchange, clientID string) string {
	id, ok := deviceOf(clientID)
	if !ok || s.opt.Service.Permit(ctx, x.by, access.ScopeRead, id) != nil {
		return `{"isAlive":false,"exists":false}`
	}
	v, err := s.opt.Service.Get(ctx, id)
	switch {
	case err != nil || !v.Presence.Online:
		return `{"isAlive":false,"exists":false}`
	case v.AudioOpen:
		return `{"isAlive":true,"exists":true}`
	case x.strict:
		return `{"isAlive":false,"exists":true}`
	}
	return `{"isAlive":null,"exists":true}`
}
