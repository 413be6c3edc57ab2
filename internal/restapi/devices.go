package restapi

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
	"fleetd/internal/selector"
)

// newDevice returns a device as the caller of a request may see it.
func (s *Server) newDevice(ctx context.Context, v *devices.View) api.Device {
	d, p := &v.Device, &v.Presence
	body := api.Device{ID: string(d.ID), Name: d.Name, Labels: d.Labels, State: string(v.State), Transport: string(p.Transport), TransportWanted: string(d.Prefer),
		Node: p.Node, Board: d.Board, Firmware: d.Firmware, Client: s.opt.Service.Client(clientOf(v)), Pending: []api.PendingClient{}, SessionID: p.Session,
		MCP: api.DeviceMCP{State: string(cmp.Or(p.MCP, devices.MCPUnknown)), Tools: p.Tools, Catalog: p.Catalog.String(),
			CatalogState: string(cmp.Or(v.CatalogState, devices.CatalogUnknown)), Partial: p.Partial, Error: p.MCPError},
		Audio:       api.DeviceAudio{Open: v.AudioOpen, Packets: v.AudioPackets, Dropped: v.AudioDropped},
		Credentials: api.Credentials{Generation: v.Credentials.Generation, PreviousUntil: api.At(v.Credentials.PreviousUntil)},
		FirstSeen:   api.At(d.FirstSeen), LastSeen: api.At(p.LastSeen), Admission: string(d.Admission), Revision: d.Revision}
	if body.Labels == nil {
		body.Labels = map[string]string{}
	}
	if p.Online {
		body.ConnectedAt, body.LastSeen = api.At(p.ConnectedAt), api.At(clock.Now())
	} else {
		body.OfflineReason, body.OfflineSince = p.Reason, api.At(p.OfflineSince)
	}
	mayApprove := caller(ctx).Caller.Scopes.Has(access.ScopeWrite)
	for _, w := range v.Pending {
		waiting := api.PendingClient{Client: s.opt.Service.Client(w.ClientID), Since: api.At(w.Since)}
		if mayApprove && w.Address.IsValid() {
			waiting.Address = w.Address.String()
		}
		body.Pending = append(body.Pending, waiting)
	}
	return body
}

// clientOf returns the Client-Id of a device: the admitted one, else the one it connected with.
func clientOf(v *devices.View) string { return cmp.Or(v.Device.ClientID, v.Presence.ClientID) }

// DevicePath names a device in a path.
type DevicePath struct {
	Device string `path:"device" doc:"The id of a device is a MAC address in any notation, or the device's own name."`
}

type listDevicesInput struct {
	Page
	Selection
	Sort      string `query:"sort" enum:"id,name,last_seen,offline_since" default:"id" doc:"The order is ascending. last_seen and offline_since list the devices that are offline."`
	State     string `query:"state" enum:"online,offline,pending,contested" doc:"pending means that the device, or another client of it, waits for approval. contested means that two devices have the same id now."`
	Transport string `query:"transport" enum:"websocket,mqtt"`
	Reason    string `query:"reason" doc:"It says why it is offline, as in offline_reason."`
	Node      string `query:"node" doc:"This node holds it."`
	Board     string `query:"board"`
	Firmware  string `query:"firmware"`
	Label     string `query:"label" doc:"It is a key, or key=value."`
	Q         string `query:"q" doc:"Part of id, name or board, without regard to case."`
}

// selector is what the filters select, those of select among them. The values of
// the others are literal.
func (in *listDevicesInput) selector() (selector.Selector, error) {
	sel, err := in.Selection.selector()
	if err != nil {
		return sel, err
	}
	if in.Label != "" {
		label, err := selector.ParseLabel(in.Label)
		if err != nil {
			return sel, badRequest(err.Error())
		}
		sel = selector.And(sel, label)
	}
	for _, one := range []struct {
		field selector.Field
		value string
	}{{selector.FieldState, in.State}, {selector.FieldTransport, in.Transport}, {selector.FieldReason, in.Reason}, {selector.FieldNode, in.Node}, {selector.FieldBoard, in.Board}, {selector.FieldFirmware, in.Firmware}} {
		if one.value != "" {
			sel = selector.And(sel, selector.In(one.field, one.value))
		}
	}
	return sel, nil
}

type patchDeviceInput struct {
	DevicePath
	Precondition
	Body api.DeviceEdit
}

type forgetInput struct {
	DevicePath
	Precondition
}

// editOf returns the body as the core takes it, with what it changes for the audit log.
func editOf(b *api.DeviceEdit) (edit fleet.Edit, changes []string) {
	edit.Name, edit.Labels = b.Name, b.Labels
	if b.Name != nil {
		changes = append(changes, "name")
	}
	if len(b.Labels) > 0 {
		changes = append(changes, "labels "+labelText(b.Labels))
	}
	if b.TransportWanted != nil {
		changes = append(changes, "transport_wanted")
		prefer := devices.Transport(*b.TransportWanted)
		edit.Prefer = &prefer
	}
	return edit, changes
}

type answer[T any] struct{ Body T }

// tagged is an answer with a revision.
type tagged[T any] struct {
	ETag         string `header:"ETag" doc:"The revision of what people may change in it, in quotes."`
	CacheControl string `header:"Cache-Control" doc:"no-store if the answer has a client_id or a secret."`
	Body         T
}

// one returns a device as the answer about it: administrators see its Client-Id.
func (s *Server) one(ctx context.Context, v *devices.View) *tagged[api.Device] {
	body, cache := s.newDevice(ctx, v), ""
	if caller(ctx).Caller.Scopes.Has(access.ScopeAdmin) {
		body.ClientID, cache = clientOf(v), "no-store"
	}
	return &tagged[api.Device]{ETag: etag(v.Device.Revision), CacheControl: cache, Body: body}
}

func (s *Server) deviceRoutes() {
	unknown := []devices.Code{devices.CodeDeviceUnknown}
	register(s, s.operation(http.MethodGet, "/v1/devices", about{id: "listDevices", scope: access.ScopeRead, tag: tagDevices, summary: "List devices",
		text: "All filters must hold. The work for one page is bounded: a page may have fewer items than limit, or none, and a next_cursor nevertheless; " +
			"the list ends where next_cursor is empty.",
		answer: "A page.", codes: []devices.Code{devices.CodeUnavailable}}), s.listDevices)
	register(s, s.operation(http.MethodGet, "/v1/devices/{device}", about{id: "getDevice", scope: access.ScopeRead, tag: tagDevices, summary: "Get a device",
		answer: "The device.", codes: append(unknown, devices.CodeUnavailable)}), s.getDevice)
	register(s, s.operation(http.MethodPatch, "/v1/devices/{device}", about{id: "editDevice", scope: access.ScopeWrite, tag: tagDevices, summary: "Change a device",
		text:   "Members left out stay as they are, and so do labels.",
		answer: "The device, changed.", codes: append(unknown, devices.CodeTooLarge, devices.CodeStale, devices.CodeUnavailable)}), s.editDevice)
	register(s, s.operation(http.MethodDelete, "/v1/devices/{device}", about{id: "forgetDevice", scope: access.ScopeWrite, tag: tagDevices, summary: "Forget a device",
		text: "Removes the device, its history, photos and stored events, what it answered in jobs, and its device log, and ends its session. " +
			"Credentials that it still has stay invalid, and clients that were refused stay refused.",
		status: http.StatusNoContent, answer: "Forgotten.", codes: append(unknown, devices.CodeStale, devices.CodeUnavailable)}), s.forgetDevice)
	register(s, s.operation(http.MethodPost, "/v1/devices/{device}/approve", about{id: "approveDevice", scope: access.ScopeWrite, tag: tagDevices, summary: "Approve a device",
		text: "Admits a waiting device, or a client that waits or was refused; the credentials of the client that it replaces end. " +
			"Instead of the device's id, the six-digit code that the client speaks will do, which also names the client.",
		answer: "The device, admitted.", codes: append(unknown, devices.CodeNotFound, devices.CodeConflict, devices.CodeLimitReached, devices.CodeUnavailable)}), s.approveDevice)
	register(s, s.operation(http.MethodDelete, "/v1/devices/{device}/clients/{client}", about{id: "refuseClient", scope: access.ScopeWrite, tag: tagDevices, summary: "Refuse a client",
		text: "Refuses a client that waits for approval as this device, such as a copy of it; nothing else changes. It gets neither credentials nor an activation code, " +
			"and does not wait again until an approval names it.",
		status: http.StatusNoContent, answer: "Refused.", codes: append(unknown, devices.CodeNotFound, devices.CodeConflict, devices.CodeUnavailable)}), s.refuseClient)
	registerRevoke(s, s.operation(http.MethodPost, "/v1/devices/{device}/revoke", about{id: "revokeDevice", scope: access.ScopeWrite, tag: tagDevices, summary: "Revoke a device",
		text:   "Invalidates its credentials and ends its session; it waits for approval at its next OTA check.",
		status: http.StatusNoContent, answer: "Revoked.", codes: append(unknown, devices.CodeUnavailable)}), s.revokeDevice)
}

// labelText writes labels for the audit log; KEY- is one that is removed.
func labelText(labels map[string]*string) string {
	var pairs []string
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		if value := labels[key]; value != nil {
			pairs = append(pairs, key+"="+*value)
		} else {
			pairs = append(pairs, key+"-")
		}
	}
	return strings.Join(pairs, ",")
}

func (s *Server) listDevices(ctx context.Context, in *listDevicesInput) (*answer[api.List[api.Device]], error) {
	sel, err := in.selector()
	if err != nil {
		return nil, err
	}
	p, err := s.page(ctx, in.Page)
	if err != nil {
		return nil, err
	}
	q := devices.ListQuery{Members: caller(ctx).Caller.NeedsLabels(), Select: selector.And(caller(ctx).Caller.Devices, sel.At(p.begun)), Text: in.Q, Sort: devices.Sort(in.Sort)}
	list, err := fillPage(p, pieceLimit, func(after string, n int) ([]api.Device, string, error) {
		q.After, q.Limit = after, n
		views, next, err := s.opt.Service.List(ctx, q)
		items := make([]api.Device, len(views))
		for i := range views {
			items[i] = s.newDevice(ctx, &views[i])
		}
		return items, next, err
	})
	return answerOf(list, err)
}

func (s *Server) getDevice(ctx context.Context, _ *DevicePath) (*tagged[api.Device], error) {
	return s.show(ctx, deviceOf(ctx))
}

func (s *Server) show(ctx context.Context, id devices.ID) (*tagged[api.Device], error) {
	v, err := s.opt.Service.Get(ctx, id)
	return s.one(ctx, &v), err
}

func (s *Server) editDevice(ctx context.Context, in *patchDeviceInput) (*tagged[api.EditedDevice], error) {
	id := deviceOf(ctx)
	ifMatch, err := in.revision()
	if err != nil {
		return nil, err
	}
	edit, changes := editOf(&in.Body)
	applies := ""
	if edit.Prefer != nil {
		applies = "next boot"
	}
	err = s.opt.Service.Edit(ctx, caller(ctx), id, ifMatch, edit)
	s.opt.Service.NoteChange(caller(ctx), "edit", id, strings.Join(changes, ", "), err)
	if err != nil {
		return nil, err
	}
	after, err := s.changed(ctx, id)
	if err != nil {
		return nil, err
	}
	d := s.one(ctx, &after)
	return &tagged[api.EditedDevice]{d.ETag, d.CacheControl, api.EditedDevice{Device: d.Body, Applies: applies}}, nil
}

// changedLimit is how long a device is read again that cannot be read after a change.
const changedLimit = 5 * time.Second

// changed is a device after a decision about it was made. That the device cannot be
// read at once must not look as if nothing had been decided.
func (s *Server) changed(ctx context.Context, id devices.ID) (devices.View, error) {
	for end := time.Now().Add(changedLimit); ; {
		v, err := s.opt.Service.Get(ctx, id)
		if err == nil || devices.AsError(err).Code != devices.CodeUnavailable {
			return v, err
		}
		if time.Now().After(end) || ctx.Err() != nil {
			return v, &devices.Error{Code: devices.CodeUnavailable, Part: "database",
				Detail: "the change is recorded, and the device cannot be read now; check whether it shows the change before you repeat it"}
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (s *Server) forgetDevice(ctx context.Context, in *forgetInput) (*struct{}, error) {
	id := deviceOf(ctx)
	ifMatch, err := in.revision()
	if err != nil {
		return nil, err
	}
	err = s.opt.Service.ForgetAt(ctx, caller(ctx), id, ifMatch)
	s.opt.Service.NoteChange(caller(ctx), "forget", id, "", err)
	unknown := err != nil && devices.AsError(err).Code == devices.CodeDeviceUnknown
	if err != nil && !unknown {
		return nil, err
	}
	// What an earlier request could not delete goes with the next one.
	if erased := s.erase(ctx, id); erased != nil {
		return nil, erased
	}
	if unknown {
		return nil, err
	}
	return nil, nil
}

// erase deletes the photos and stored events of a device, and what it answered in jobs. Each
// node deletes its device log when it learns that the device is forgotten.
func (s *Server) erase(ctx context.Context, id devices.ID) error {
	_, photos := s.opt.Photos.DeleteAll(ctx, id)
	stored, answers := errors.Join(photos, s.opt.Events.Erase(ctx, id)), s.opt.Jobs.Erase(ctx, id)
	err, part := errors.Join(stored, answers), "nats"
	if err == nil {
		return nil
	}
	if stored == nil {
		part = "database"
	}
	s.opt.Log.Warn("a device is forgotten, and its photos, events and answers are not deleted yet", "device", id, "error", err)
	return &devices.Error{Code: devices.CodeUnavailable, Part: part,
		Detail: "the device is forgotten, but not all of its photos, events and answers in jobs could be deleted; repeat the request until it is answered 404"}
}

// spokenCode is what a waiting device speaks.
var spokenCode = regexp.MustCompile(`^[0-9]{6}$`)

type approveInput struct {
	DevicePath
	Body *api.Approval
}

func (s *Server) approveDevice(ctx context.Context, in *approveInput) (*tagged[api.Device], error) {
	by := caller(ctx)
	if by.Caller.Limited() && spokenCode.MatchString(in.Device) {
		// It may be that of a device which the key is not for.
		return nil, newProblem(&devices.Error{Code: devices.CodeForbidden, Rule: access.RuleDevices, Detail: "a key for some devices approves by device id, not by code"})
	}
	client, detail := "", ""
	if in.Body != nil && in.Body.Client != "" {
		client, detail = in.Body.Client, "client "+in.Body.Client
	}
	id, err := s.opt.Service.Approve(ctx, by, in.Device, client)
	s.opt.Service.NoteChange(by, "approve", cmp.Or(id, devices.ID(in.Device)), detail, err)
	if err != nil {
		return nil, err
	}
	return s.show(ctx, id)
}

type refuseInput struct {
	DevicePath
	Client string `path:"client" pattern:"^[0-9a-f]{12}$" doc:"The client, as pending of the device shows it."`
}

func (s *Server) refuseClient(ctx context.Context, in *refuseInput) (*struct{}, error) {
	id := deviceOf(ctx)
	err := s.opt.Service.Refuse(ctx, caller(ctx), id, in.Client)
	s.opt.Service.NoteChange(caller(ctx), "refuse", id, "client "+in.Client, err)
	return nil, err
}

func (s *Server) revokeDevice(ctx context.Context, _ *DevicePath) (*revokedAnswer, error) {
	id := deviceOf(ctx)
	r, err := s.opt.Service.Revoke(ctx, caller(ctx), id)
	s.opt.Service.NoteChange(caller(ctx), "revoke", id, "", err)
	return newRevoked(r), err
}
