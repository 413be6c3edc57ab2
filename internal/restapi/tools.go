package restapi

import (
	"context"
	"fmt"
	"net/http"
	"strconv"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/jsonspan"
)

type listToolsInput struct {
	DevicePath
	User bool `query:"user" doc:"With true, the list has the tools, too, that the device keeps for its user."`
}

type catalogPath struct {
	SHA256 string `path:"sha256" doc:"The hash has 64 hex digits."`
}

type historyInput struct {
	DevicePath
	Page
}

func (s *Server) toolRoutes() {
	tools := schemaOf[api.ToolList](s)
	register(s, withAnswer(s.operation(http.MethodGet, "/v1/devices/{device}/tools", about{id: "listTools", scope: access.ScopeRead, tag: tagTools,
		summary: "List a device's tools", answer: "The tools, and how sure they are.",
		codes: []devices.Code{devices.CodeDeviceUnknown, devices.CodeUnavailable}}), "application/json", tools), s.listTools)
	register(s, withAnswer(s.operation(http.MethodPost, "/v1/devices/{device}/tools/refresh", about{id: "refreshTools", scope: access.ScopeRead, tag: tagTools,
		summary: "Read a device's tools again", text: "Takes as long as the device does.", answer: "The tools, verified.",
		codes: []devices.Code{devices.CodeDeviceUnknown, devices.CodeDeviceOffline, devices.CodeSuperseded, devices.CodeConnectionLost,
			devices.CodeDeviceError, devices.CodeDeviceTimeout, devices.CodeUnavailable}}), "application/json", tools), s.refreshTools)
	register(s, withAnswer(s.operation(http.MethodGet, "/v1/catalogs/{sha256}", about{id: "getCatalog", scope: access.ScopeRead, tag: tagTools,
		summary: "Get a stored tool list", answer: "The list.",
		codes: []devices.Code{devices.CodeNotFound, devices.CodeUnavailable}}), "application/json", schemaOf[api.StoredCatalog](s)), s.getCatalog)
	register(s, s.operation(http.MethodGet, "/v1/devices/{device}/catalogs", about{id: "listDeviceCatalogs", scope: access.ScopeRead, tag: tagTools,
		summary: "List the tool lists a device had", answer: "A page, newest first.",
		codes: []devices.Code{devices.CodeDeviceUnknown, devices.CodeUnavailable}}), s.listDeviceCatalogs)
}

func (s *Server) listTools(ctx context.Context, in *listToolsInput) (*raw, error) {
	tools, err := s.opt.Service.Tools(ctx, deviceOf(ctx), in.User)
	return newRaw(encodeTools(tools)), err
}

func (s *Server) refreshTools(ctx context.Context, in *listToolsInput) (*raw, error) {
	if err := s.draining(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, dispatch.MaxTimeout)
	defer cancel()
	tools, err := s.opt.Service.Refresh(ctx, deviceOf(ctx), in.User)
	return newRaw(encodeTools(tools)), err
}

// encodeTools keeps every byte of the tools, white space included.
func encodeTools(t devices.ToolList) []byte {
	size := 160
	for _, tool := range t.Tools {
		size += len(tool) + 1
	}
	b := make([]byte, 0, size)
	b = append(b, `{"catalog":"`...)
	b = append(b, t.Catalog.String()...)
	b = append(b, `","state":"`...)
	b = append(b, t.State...)
	b = strconv.AppendBool(append(b, `","partial":`...), t.Partial)
	b = append(b, `,"items":[`...)
	for i, tool := range t.Tools {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, tool...)
	}
	return append(b, "]}\n"...)
}

func (s *Server) getCatalog(ctx context.Context, in *catalogPath) (*raw, error) {
	hash, err := devices.ParseHash(in.SHA256)
	if err != nil {
		return nil, badRequest(err.Error())
	}
	by := caller(ctx)
	if err := s.opt.Service.PermitCatalog(ctx, by, hash); err != nil {
		s.opt.Service.NoteRefusal(by, "getCatalog", "", err)
		return nil, err
	}
	cat, err := s.opt.Service.Catalog(ctx, hash)
	if err != nil {
		return nil, err
	}
	b := jsonspan.AppendString([]byte(`{"catalog":`), cat.Hash.String())
	b = append(b, `,"items":`...)
	b = append(b, cat.JSON...)
	return newRaw(append(b, "}\n"...)), nil
}

func (s *Server) listDeviceCatalogs(ctx context.Context, in *historyInput) (*answer[api.List[api.HistoryEntry]], error) {
	id := deviceOf(ctx)
	p, err := s.page(ctx, in.Page)
	if err != nil {
		return nil, err
	}
	list, err := fillPage(p, pieceLimit, func(after string, n int) (items []api.HistoryEntry, next string, err error) {
		var epoch, seq int64
		if after != "" {
			if _, err := fmt.Sscanf(after, "%d.%d", &epoch, &seq); err != nil {
				return nil, "", errCursor
			}
		}
		entries, err := s.opt.Service.History(ctx, id, devices.Epoch(epoch), seq, n+1)
		for i, e := range entries {
			if i == n {
				next = fmt.Sprintf("%d.%d", entries[i-1].Epoch, entries[i-1].Seq)
				break
			}
			items = append(items, api.HistoryEntry{Catalog: e.Catalog.String(), Firmware: e.Firmware, ELF: e.ELF, Partial: e.Partial, Since: api.At(e.At)})
		}
		return items, next, err
	})
	if err == nil && len(list.Items) == 0 && p.after == "" {
		_, err = s.opt.Service.Get(ctx, id) // nobody has no history
	}
	return answerOf(list, err)
}
