package restapi

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
)

const pathPolicy = "/v1/policy"

type versionPath struct {
	Version int64 `path:"version" minimum:"1"`
}

type explainInput struct {
	Key       string `query:"key" required:"true" doc:"Id or name of an API key; or admin, open, voice, gateway."`
	Device    string `query:"device" required:"true" doc:"This is the id of a device."`
	Tool      string `query:"tool" required:"true"`
	Via       string `query:"via" enum:"rest,raw,nats,gateway,voice,mcp,job" default:"rest" doc:"The call comes in this way."`
	Arguments string `query:"arguments" doc:"It is a JSON object; the addresses in it are checked against the list."`
}

func (s *Server) policyRoutes() {
	document := schemaOf[access.Policy](s)
	register(s, s.operation(http.MethodGet, pathPolicy, about{id: "getPolicy", scope: access.ScopeAdmin, tag: tagAccess,
		summary: "Get the rules in force", text: "What PUT takes; the ETag is the version. After these rules the built-in ones apply, see docs/access.md.",
		answer: "The policy."}), s.getPolicy)
	put := s.operation(http.MethodPut, pathPolicy, about{id: "setPolicy", scope: access.ScopeAdmin, tag: tagAccess,
		summary: "Replace the rules", text: "In force at once, on all nodes. The version that the change was made from is given as If-Match or as base_version; " +
			"if another was written meanwhile, nothing changes. version, changed, by and warnings in the body are passed over.",
		answer: "The policy, with its new version; warnings names globs that match no known tool.", codes: []devices.Code{devices.CodeTooLarge, devices.CodeStale, devices.CodeUnavailable}})
	registerRaw(s, put, document, s.setPolicy)
	register(s, s.operation(http.MethodGet, pathPolicy+"/versions", about{id: "listPolicyVersions", scope: access.ScopeAdmin, tag: tagAccess,
		summary: "List the versions of the rules", answer: "A page, newest first.", codes: []devices.Code{devices.CodeUnavailable}}), s.listPolicyVersions)
	register(s, withAnswer(s.operation(http.MethodGet, pathPolicy+"/versions/{version}", about{id: "getPolicyVersion", scope: access.ScopeAdmin, tag: tagAccess,
		summary: "Get a version of the rules", answer: "The policy as it was.", codes: []devices.Code{devices.CodeNotFound, devices.CodeUnavailable}}),
		"application/json", document), s.getPolicyVersion)
	register(s, s.operation(http.MethodGet, pathPolicy+"/explain", about{id: "explainPolicy", scope: access.ScopeAdmin, tag: tagAccess,
		summary: "Explain which rule decides", text: "Nothing is called.", answer: "The decision on the call, and everything that was checked, in order.",
		codes: []devices.Code{devices.CodeNotFound, devices.CodeDeviceUnknown, devices.CodeUnavailable}}), s.explainPolicy)
}

func (s *Server) getPolicy(context.Context, *struct{}) (*tagged[access.Policy], error) {
	return taggedPolicy(s.opt.Service.Guard().Policy()), nil
}

func taggedPolicy(p access.Policy) *tagged[access.Policy] {
	return &tagged[access.Policy]{ETag: etag(p.Version), CacheControl: "no-store", Body: p}
}

// setPolicyInput has the body as it came, which access.ParsePolicy reads, also from a file.
type setPolicyInput struct {
	Match
	Base    string `query:"base_version" doc:"This version was read. It is 0 if there was none."`
	RawBody []byte
}

func (s *Server) setPolicy(ctx context.Context, in *setPolicyInput) (*tagged[access.Policy], error) {
	p, err := s.runSetPolicy(ctx, in)
	if err != nil {
		return nil, err
	}
	p.Warnings = s.opt.Service.UnmatchedTools(p)
	return taggedPolicy(p), nil
}

func (s *Server) runSetPolicy(ctx context.Context, in *setPolicyInput) (p access.Policy, err error) {
	base, match := in.Base, in.revision()
	if match != "" {
		base = match
	}
	version, err := strconv.ParseInt(base, 10, 64)
	if err != nil || version < 0 {
		return p, badRequest("say which version your change was made from, as base_version or If-Match: GET " + pathPolicy + " names it")
	}
	if p, err = access.ParsePolicy(in.RawBody); err != nil {
		return p, badRequest(err.Error())
	}
	p, err = s.opt.Service.SetPolicy(ctx, caller(ctx), p, version)
	if err != nil && match == "" && devices.AsError(err).Code == devices.CodeStale { // 412 answers If-Match
		return p, badRequest(devices.AsError(err).Detail)
	}
	return p, err
}

func (s *Server) listPolicyVersions(ctx context.Context, in *Page) (*answer[api.List[api.PolicyVersion]], error) {
	p, err := s.page(ctx, *in)
	if err != nil {
		return nil, err
	}
	list, err := fillPage(p, policyPiece, func(after string, n int) (items []api.PolicyVersion, next string, err error) {
		before, err := numberOf(after)
		if err != nil {
			return nil, "", err
		}
		versions, err := s.opt.Archive.PolicyVersions(ctx, before, n+1)
		for i, p := range versions {
			if i == n {
				next = numberPlace(versions[i-1].Version)
				break
			}
			items = append(items, api.PolicyVersion{Version: p.Version, Changed: api.At(p.Changed), By: p.By, Rules: len(p.Rules)})
		}
		return items, next, err
	})
	return answerOf(list, err)
}

// policyPiece is how many versions are read at once: each has up to access.MaxPolicyBytes.
const policyPiece = 16

func (s *Server) getPolicyVersion(ctx context.Context, in *versionPath) (*raw, error) {
	p, err := s.opt.Archive.PolicyVersion(ctx, in.Version)
	if err != nil {
		return nil, err
	}
	if p.Version != in.Version {
		return nil, newProblem(&devices.Error{Code: devices.CodeNotFound, Detail: "there is no version " + strconv.FormatInt(in.Version, 10) + " of the policy"})
	}
	body, err := json.Marshal(p)
	return newRaw(append(body, '\n')), err
}

func (s *Server) explainPolicy(ctx context.Context, in *explainInput) (*answer[access.Explanation], error) {
	id, err := parseDevice(in.Device)
	if err != nil {
		return nil, err
	}
	h := fleet.ExplainRequest{Key: in.Key, Device: id, Tool: in.Tool, Via: access.Via(in.Via)}
	if in.Arguments != "" {
		if h.Arguments, err = object([]byte(in.Arguments), "arguments"); err != nil || !json.Valid(h.Arguments) {
			return nil, badRequest("arguments must be a JSON object")
		}
	}
	x, err := s.opt.Service.Explain(ctx, h)
	return answerOf(x, err)
}
