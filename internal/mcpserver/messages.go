package mcpserver

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/api"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/jobs/manager"
)

// messageTime is how long one device may take to accept a message.
const messageTime = 10 * time.Second

type messageArgs struct {
	Devices []string `json:"devices"`
	Select  string   `json:"select"`
	Text    string   `json:"text"`
	Title   string   `json:"title"`
	Later   string   `json:"later"`
}

// alert is the message that any stock device shows, with a sound (xiaozhi-esp32, main/application.cc).
type alert struct {
	Type    string `json:"type"`
	Status  string `json:"status"`
	Message string `json:"message"`
	Emotion string `json:"emotion"`
}

func (s *Server) sendMessage(ctx context.Context, req *mcp.CallToolRequest, args messageArgs) (*mcp.CallToolResult, error) {
	by := requestInfoOf(ctx).by()
	later, err := parseLater(args.Later)
	if err != nil {
		return nil, err
	}
	if s.opt.Draining() {
		return nil, errStopping()
	}
	body, err := json.Marshal(alert{"alert", cmp.Or(args.Title, "Message"), args.Text, "neutral"})
	if err != nil {
		return nil, fmt.Errorf("encode a message: %w", err)
	}
	if later > 0 {
		return s.messageJob(ctx, &args, body, later)
	}
	ids, left, err := s.targets(ctx, by, args.Devices, args.Select)
	if err != nil {
		return nil, err
	}
	errs := make([]error, len(ids))
	s.forEach(ctx, req, len(ids), "devices have the message", func(i int) {
		one, cancel := context.WithTimeout(ctx, messageTime)
		defer cancel()
		errs[i] = s.opt.Service.SendMessage(one, devices.Message{ID: s.opt.Service.NewCallID(), Device: ids[i], Body: body, Principal: by})
	})
	if ctx.Err() != nil {
		return nil, errCancelled()
	}
	answer := struct {
		Shown   []devices.ID `json:"shown_on"`
		LeftOut []leftOut    `json:"left_out,omitempty"`
		More    bool         `json:"more_left_out,omitempty"`
		Hint    string       `json:"hint,omitempty"`
	}{Shown: []devices.ID{}}
	for i, id := range ids {
		switch {
		case errs[i] == nil:
			answer.Shown = append(answer.Shown, id)
		case len(ids)+len(left) == 1:
			return nil, errs[i]
		default:
			left = append(left, leftOut{Device: string(id), Reason: string(devices.AsError(errs[i]).Code)})
		}
	}
	answer.LeftOut, answer.More = firstLeft(left)
	switch {
	case len(ids)+len(left) == 0:
		answer.Hint = noneSelected
	case len(left) > 0:
		answer.Hint = "with later, devices that are offline get the message when they are back"
	}
	return structured(answer), nil
}

// messageJob sends a message to devices as they are connected, within a time.
func (s *Server) messageJob(ctx context.Context, args *messageArgs, body []byte, later time.Duration) (*mcp.CallToolResult, error) {
	by := requestInfoOf(ctx).by()
	sel, err := selectorOf(args.Select)
	if err != nil {
		return nil, err
	}
	spec := api.JobSpec{Select: sel.String(), Action: api.JobAction{Message: body}, When: &api.JobWhen{Until: api.At(clock.Now().Add(later))}}
	ids, err := s.devicesOf(ctx, by, args.Devices)
	if err != nil {
		return nil, err
	}
	spec.Devices = devices.Texts(ids)
	j, _, err := s.opt.Jobs.Create(ctx, by, spec, manager.CreateOptions{})
	if err != nil {
		return nil, err
	}
	return structured(newJobInfo(&j, nil)), nil
}
