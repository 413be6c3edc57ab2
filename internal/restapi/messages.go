package restapi

import (
	"bytes"
	"context"
	"net/http"
	"slices"
	"strings"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/envelope"
)

const (
	pathMessages     = "/v1/devices/{device}/messages"
	pathAuthenticate = "/v1/mqtt/authenticate"
	messageTimeout   = 10 * time.Second
)

// messageTypes may be sent here. What belongs to a conversation (tts, stt, llm)
// needs the order of a voice service, which attaches over NATS.
var messageTypes = []string{"alert", "notify", "custom", "system"}

// message describes the body, which is passed on as it is.
type message struct {
	Type    string `json:"type" enum:"alert,notify,custom,system"`
	Status  string `json:"status,omitempty" doc:"This is the headline of an alert."`
	Message string `json:"message,omitempty" doc:"This is the text of an alert."`
	Emotion string `json:"emotion,omitempty" doc:"This is the face of an alert, such as happy or neutral."`
	Command string `json:"command,omitempty" doc:"A message of the type system has the command reboot."`
}

type sent struct {
	OK bool `json:"ok"`
}

// mqttLogin is what an MQTT client presents.
type mqttLogin struct {
	ClientID string `json:"clientid"`
	Username string `json:"username,omitempty"`
	Password string `json:"password,omitempty"`
}

// judgement is the answer in the words of EMQX's HTTP authentication.
type judgement struct {
	Result string `json:"result" enum:"allow,deny"`
}

func (s *Server) messageRoutes() {
	op := s.operation(http.MethodPost, pathMessages, about{id: "sendMessage", scope: access.ScopeCall, judged: true, tag: tagDevices, summary: "Send a message to a device",
		text: "alert makes any stock device show and play it; notify, custom and system depend on its firmware. Further members are passed on untouched. A system message needs tools:call:user. " +
			"Devices do not answer messages: ok means that it was written, or that it is queued after the speech that is being sent.",
		answer: "It was accepted.", codes: []devices.Code{devices.CodeDeviceUnknown, devices.CodeDeviceOffline, devices.CodeSuperseded,
			devices.CodeConnectionLost, devices.CodeDeviceBusy, devices.CodeTooLarge, devices.CodeUnavailable}})
	registerRaw(s, op, schemaOf[message](s), s.sendMessage)
	if s.opt.Authenticate != nil {
		register(s, s.operation(http.MethodPost, pathAuthenticate, about{id: "authenticateMQTT", scope: access.ScopeBroker, tag: tagDevices,
			summary: "Tell a broker whether a client may come in",
			text:    "For the HTTP authentication of an external MQTT broker; see docs/howto/emqx.md.",
			answer:  "The judgement; a refusal is 200 as well."}), s.authenticate)
	}
}

// sendMessageInput has the body as it came, which is passed on.
type sendMessageInput struct {
	DevicePath
	RawBody []byte
}

// sentAnswer is that of a message.
type sentAnswer struct {
	Call string `header:"Fleetd-Call" doc:"The audit and logs have this id of the message."`
	Body sent
}

func (s *Server) sendMessage(ctx context.Context, in *sendMessageInput) (*sentAnswer, error) {
	call, err := s.runMessage(ctx, in)
	return &sentAnswer{call, sent{true}}, err
}

func (s *Server) runMessage(ctx context.Context, in *sendMessageInput) (call string, err error) {
	id, err := parseDevice(in.Device)
	if err != nil {
		return "", err
	}
	m, err := envelope.Parse(in.RawBody)
	if err != nil {
		return "", badRequest(`the body must be a JSON object with a string "type": ` + err.Error())
	}
	if !slices.Contains(messageTypes, string(m.Type)) {
		return "", badRequest("messages of type " + strings.ToValidUTF8(string(m.Type[:min(len(m.Type), 40)]), "?") + " cannot be sent here; these can: " + strings.Join(messageTypes, ", "))
	}
	if err := s.draining(); err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, messageTimeout)
	defer cancel()
	call = s.opt.Service.NewCallID()
	// The core may still hold the message when the buffer serves another request.
	return call, s.opt.Service.SendMessage(ctx, devices.Message{ID: call, Device: id, Body: bytes.Clone(in.RawBody), Principal: caller(ctx)})
}

type authenticateInput struct{ Body mqttLogin }

func (s *Server) authenticate(_ context.Context, in *authenticateInput) (*answer[judgement], error) {
	if err := s.opt.Authenticate(in.Body.ClientID, in.Body.Username, in.Body.Password); err != nil {
		s.opt.Log.Debug("MQTT client refused", "name", credential.LoginName(in.Body.ClientID), "error", err)
		return &answer[judgement]{judgement{"deny"}}, nil
	}
	return &answer[judgement]{judgement{"allow"}}, nil
}
