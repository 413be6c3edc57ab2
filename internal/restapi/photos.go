package restapi

import (
	"context"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
)

const pathPhoto = "/v1/photos/{id}"

type listPhotosInput struct {
	Page
	Device string `query:"device" doc:"The list has only photos of this device."`
}

// PhotoPath names a photo.
type PhotoPath struct {
	ID string `path:"id" doc:"This is the id of a photo."`
}

type getPhotoInput struct {
	PhotoPath
	IfNoneMatch string `header:"If-None-Match" doc:"ETags of the photo as it was read: 304 if it is one of these."`
}

func (s *Server) photoRoutes() {
	gone := []devices.Code{devices.CodeNotFound, devices.CodeUnavailable}
	register(s, s.operation(http.MethodGet, "/v1/photos", about{id: "listPhotos", scope: access.ScopePhotos, tag: tagPhotos, summary: "List photos",
		answer: "A page, newest first.", codes: gone[1:]}), s.listPhotos)
	register(s, s.operation(http.MethodDelete, pathPhoto, about{id: "deletePhoto", scope: access.ScopeWrite, tag: tagPhotos, summary: "Delete a photo",
		status: http.StatusNoContent, answer: "Deleted.", codes: gone}), s.deletePhoto)
	get := withAnswer(s.operation(http.MethodGet, pathPhoto, about{id: "getPhoto", scope: access.ScopePhotos, tag: tagPhotos, summary: "Get a photo",
		answer: "The JPEG itself; its ETag is its SHA-256.", codes: gone}), mediaJPEG, &huma.Schema{Type: huma.TypeString, Format: "binary"})
	get.Responses["304"] = &huma.Response{Description: "If-None-Match names it."}
	plain(s, get, s.photo)
}

func (s *Server) listPhotos(ctx context.Context, in *listPhotosInput) (*answer[api.List[api.Photo]], error) {
	p, err := s.page(ctx, in.Page)
	if err != nil {
		return nil, err
	}
	by := caller(ctx)
	var id devices.ID
	if in.Device != "" {
		if id, err = parseDevice(in.Device); err != nil {
			return nil, err
		}
		if err := s.permitDevice(ctx, by, access.ScopePhotos, "listPhotos", id); err != nil {
			return nil, err
		}
	}
	permitted := map[devices.ID]bool{}
	list, err := fillPage(p, MaxLimit, func(before string, n int) (items []api.Photo, next string, err error) {
		for range maxPhotoPages {
			piece := n - len(items)
			if by.Caller.Limited() && id == "" {
				piece = MaxLimit // most may be of other devices
			}
			photos, more, err := s.opt.Photos.List(ctx, id, before, piece)
			if err != nil {
				return nil, "", err
			}
			for i, p := range photos {
				allowed, known := permitted[p.Device]
				if !known {
					err := s.opt.Service.Permit(ctx, by, access.ScopePhotos, p.Device)
					if isUnavailable(err) {
						return nil, "", err
					}
					allowed = err == nil
					permitted[p.Device] = allowed
				}
				if before = p.ID; !allowed {
					continue
				}
				items = append(items, api.Photo{ID: p.ID, Device: string(p.Device), Question: p.Question, Bytes: p.Bytes, SHA256: p.SHA256, Kind: p.Kind, TakenAt: api.At(p.TakenAt)})
				if len(items) == n {
					more = more || i < len(photos)-1
					break
				}
			}
			if !more {
				return items, "", nil
			}
			if len(items) == n {
				break
			}
		}
		return items, before, nil
	})
	return answerOf(list, err)
}

// maxPhotoPages bounds the search of a key for some devices for its photos
// among those of others: a page may hold fewer than asked for, and none.
const maxPhotoPages = 20

// permitPhoto opens a photo for somebody who may. A key for some devices cannot
// tell a photo of another device from none.
func (s *Server) permitPhoto(ctx context.Context, by access.Principal, scope access.Scope, action, id string) (devices.Photo, io.ReadCloser, error) {
	p, content, err := s.opt.Photos.Open(ctx, by.Key(), id)
	if err != nil && (!by.Caller.Limited() || devices.AsError(err).Code != devices.CodeNotFound) {
		return p, nil, err
	}
	if err != nil {
		p.Device = noDevice
	}
	if refusal := s.permitDevice(ctx, by, scope, action, p.Device); refusal != nil {
		if err == nil {
			content.Close()
		}
		return p, nil, refusal
	}
	return p, content, err
}

// noDevice is a device that no selector chooses.
const noDevice = devices.ID("-")

func (s *Server) deletePhoto(ctx context.Context, in *PhotoPath) (*struct{}, error) {
	by := caller(ctx)
	p, content, err := s.permitPhoto(ctx, by, access.ScopeWrite, "deletePhoto", in.ID)
	if err != nil {
		return nil, err
	}
	content.Close()
	err = s.opt.Photos.Delete(ctx, in.ID)
	s.opt.Service.NoteChange(by, "delete_photo", p.Device, p.ID, err)
	return nil, err
}

const mediaJPEG = "image/jpeg"

// photo streams the JPEG. A store that breaks off midway leaves a short body,
// which the client sees by its Content-Length.
func (s *Server) photo(w http.ResponseWriter, r *http.Request, in *getPhotoInput) {
	p, content, err := s.permitPhoto(r.Context(), s.by(r, access.ViaREST), access.ScopePhotos, "getPhoto", in.ID)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	defer content.Close()
	tag := `"` + p.SHA256 + `"`
	h := w.Header()
	h.Set("ETag", tag)
	h.Set("Cache-Control", "private, no-cache")
	if matches(in.IfNoneMatch, tag) {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	h.Set("Content-Type", mediaJPEG)
	h.Set("Content-Length", strconv.FormatInt(p.Bytes, 10))
	h.Set("Last-Modified", p.TakenAt.UTC().Format(http.TimeFormat))
	h.Set("Content-Disposition", `inline; filename="`+p.ID+`.jpg"`)
	if r.Method == http.MethodHead {
		return
	}
	if _, err := io.Copy(w, content); err != nil && r.Context().Err() == nil {
		s.opt.Log.Warn("photo not served to its end", "photo", p.ID, "error", err)
	}
}

// matches implements If-None-Match (RFC 9110, 13.1.2).
func matches(header, tag string) bool {
	for candidate := range strings.SplitSeq(header, ",") {
		candidate = strings.TrimSpace(candidate)
		if candidate == "*" || strings.TrimPrefix(candidate, "W/") == tag {
			return true
		}
	}
	return false
}
