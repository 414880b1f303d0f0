//! Expansion of `#[capability]`: vtable, shim and handle for a trait.

use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use quote::{format_ident, quote};
use syn::visit_mut::VisitMut;
use syn::{FnArg, ItemTrait, LitInt, LitStr, Pat, ReturnType, TraitItem, TraitItemFn, Type};

pub fn expand(args: TokenStream, item: TokenStream) -> syn::Result<TokenStream> {
    let Args { id, major, path } = Args::parse(args)?;
    let mut item: ItemTrait = syn::parse2(item)?;
    check_trait(&item)?;

    let mut methods = Vec::new();
    let mut defaults = Vec::new();
    for entry in &mut item.items {
        let TraitItem::Fn(f) = entry else {
            return Err(syn::Error::new_spanned(entry, "a capability trait holds methods only"));
        };
        let method = Method::read(f)?;
        if f.default.is_some() {
            defaults.push(method.move_default_out(f, &item.ident));
        }
        methods.push(method);
    }

    let name = &item.ident;
    let vis = &item.vis;
    let handle = format_ident!("{name}Handle");
    let vtable = format_ident!("{name}VTable");
    let api = quote!(#path::abi::generated);
    let handle_doc = format!("A counted reference to some [`{name}`], wherever it lives.");

    let slots = methods.iter().map(|m| m.slot_field(&api));
    let shims = methods.iter().map(|m| m.shim_fn(name, &api));
    let shim_names = methods.iter().map(|m| &m.name);
    let descs = methods.iter().map(|m| m.desc(&api));
    let calls = methods.iter().enumerate().map(|(i, m)| m.handle_method(i, name, &vtable, &api));

    Ok(quote! {
        #item

        #(#defaults)*

        #[doc = #handle_doc]
        #[derive(Clone, Debug)]
        #[repr(transparent)]
        #vis struct #handle(#api::Object);

        #[repr(C)]
        #[doc(hidden)]
        #[allow(missing_debug_implementations, dead_code)]
        #vis struct #vtable {
            head: #api::VTableHead,
            #(#slots),*
        }

        #[allow(
            improper_ctypes_definitions,
            non_camel_case_types,
            clippy::undocumented_unsafe_blocks,
            clippy::unit_arg,
            clippy::let_unit_value,
            clippy::too_many_arguments,
            clippy::useless_conversion,
            unused_variables
        )]
        const _: () = {
            use #api::{Cross as _, CrossReturn as _, Interface as _};

            struct Shim<T>(::std::marker::PhantomData<T>);

            // SAFETY of all shims: the vtable of an object is made by `new` below for its own T,
            // and a handle passes the object's own address.
            impl<T: #name + 'static> Shim<T> {
                const VTABLE: #vtable = #vtable {
                    head: #api::Instance::<T>::head(
                        <#handle as #api::Interface>::ID,
                        <#handle as #api::Interface>::MAJOR,
                        <#handle as #api::Interface>::METHODS,
                        stringify!(#name),
                    ),
                    #(#shim_names: Self::#shim_names),*
                };
                const VTABLE_REF: &'static #vtable = &Self::VTABLE;
                #(#shims)*
            }

            impl #handle {
                /// Offers `value` under this interface.
                pub fn new<T: #name + 'static>(value: ::std::sync::Arc<T>) -> Self {
                    // SAFETY: the vtable is the one made for T.
                    Self(unsafe { #api::Object::new(value, &Shim::<T>::VTABLE_REF.head) })
                }
            }

            impl #api::Interface for #handle {
                const ID: &'static str = #id;
                const MAJOR: u32 = #major;
                const METHODS: &'static [#api::MethodDesc] = &[#(#descs),*];
                unsafe fn from_object_unchecked(object: #api::Object) -> Self {
                    Self(object)
                }
                fn object(&self) -> &#api::Object {
                    &self.0
                }
                fn into_object(self) -> #api::Object {
                    self.0
                }
            }

            impl #name for #handle {
                #(#calls)*
            }

            // SAFETY: a handle is its object; `lift` gets one lowered from the same interface.
            unsafe impl #api::Cross for #handle {
                type Raw = #api::Object;
                fn lower(self) -> #api::Object {
                    self.0
                }
                unsafe fn lift(raw: #api::Object) -> Self {
                    Self(raw)
                }
            }

            impl ::std::convert::From<#handle> for #path::Capability {
                fn from(handle: #handle) -> Self {
                    #path::Capability::from_object(#api::Interface::into_object(handle))
                }
            }
        };
    })
}

/// `id = "...", major = N` and, inside resource-api itself, `path = crate`.
struct Args {
    id: LitStr,
    major: LitInt,
    path: TokenStream,
}

impl Args {
    fn parse(args: TokenStream) -> syn::Result<Self> {
        let (mut id, mut major, mut path) = (None, None, quote!(::resource_api));
        let parser = syn::meta::parser(|meta| {
            if meta.path.is_ident("id") {
                id = Some(meta.value()?.parse()?);
            } else if meta.path.is_ident("major") {
                major = Some(meta.value()?.parse()?);
            } else if meta.path.is_ident("path") {
                meta.value()?.parse::<syn::Token![crate]>()?;
                path = quote!(crate);
            } else {
                return Err(meta.error("expected `id` or `major`"));
            }
            Ok(())
        });
        syn::parse::Parser::parse2(parser, args)?;
        let missing = |what| syn::Error::new(Span::call_site(), format!("missing `{what} = ...`"));
        Ok(Self {
            id: id.ok_or_else(|| missing("id"))?,
            major: major.ok_or_else(|| missing("major"))?,
            path,
        })
    }
}

fn check_trait(item: &ItemTrait) -> syn::Result<()> {
    if !item.generics.params.is_empty() {
        return Err(syn::Error::new_spanned(&item.generics, "a capability trait has no generics"));
    }
    let has = |name: &str| {
        item.supertraits
            .iter()
            .any(|bound| matches!(bound, syn::TypeParamBound::Trait(t) if t.path.is_ident(name)))
    };
    if has("Send") && has("Sync") {
        return Ok(());
    }
    Err(syn::Error::new_spanned(&item.ident, "a capability trait is declared `: Send + Sync`"))
}

struct Method {
    name: Ident,
    args: Vec<(Ident, Type)>,
    ret: Type,
    optional: bool,
    plain_return: bool,
    attrs: Vec<syn::Attribute>,
}

impl Method {
    fn read(f: &TraitItemFn) -> syn::Result<Self> {
        let err = |what| Err(syn::Error::new_spanned(&f.sig, what));
        if !f.sig.generics.params.is_empty() || f.sig.asyncness.is_some() {
            return err("a capability method has no generics and is not async");
        }
        let mut inputs = f.sig.inputs.iter();
        match inputs.next() {
            Some(FnArg::Receiver(r)) if r.reference.is_some() && r.mutability.is_none() => {}
            _ => return err("a capability method takes &self"),
        }
        let mut args = Vec::new();
        for input in inputs {
            let FnArg::Typed(arg) = input else { return err("unexpected receiver") };
            let Pat::Ident(pat) = &*arg.pat else { return err("arguments have plain names") };
            args.push((pat.ident.clone(), (*arg.ty).clone()));
        }
        let ret = match &f.sig.output {
            ReturnType::Default => syn::parse_quote!(()),
            ReturnType::Type(_, ty) => (**ty).clone(),
        };
        let plain_return = !matches!(&ret, Type::Path(p)
            if p.path.segments.last().is_some_and(|s| s.ident == "Result"));
        let attrs = f.attrs.iter().filter(|a| a.path().is_ident("doc")).cloned().collect();
        let name = f.sig.ident.clone();
        Ok(Self { name, args, ret, optional: f.default.is_some(), plain_return, attrs })
    }

    fn default_fn(&self, trait_name: &Ident) -> Ident {
        format_ident!("__{}_{}_default", trait_name.to_string().to_lowercase(), self.name)
    }

    /// Moves the default body into a function, so that the handle can run it too when the other
    /// side is too old to have the method.
    fn move_default_out(&self, f: &mut TraitItemFn, trait_name: &Ident) -> TokenStream {
        let default_fn = self.default_fn(trait_name);
        let body = f.default.take().map(|b| rename_self(quote!(#b)));
        let names = self.args.iter().map(|(n, _)| n);
        f.default = Some(syn::parse_quote!({ #default_fn(self, #(#names),*) }));
        let mut sig = f.sig.clone();
        sig.ident = default_fn;
        let inputs = sig.inputs.iter().skip(1);
        let (name, output) = (&sig.ident, &sig.output);
        quote! {
            #[allow(non_snake_case, unused_variables, clippy::too_many_arguments)]
            fn #name<__S: #trait_name + ?Sized>(__this: &__S, #(#inputs),*) #output #body
        }
    }

    fn raw_args(&self, api: &TokenStream) -> Vec<TokenStream> {
        let raw = |(_, ty): &(Ident, Type)| {
            let ty = with_static_lifetimes(ty);
            quote!(<#ty as #api::Cross>::Raw)
        };
        self.args.iter().map(raw).collect()
    }

    fn raw_ret(&self, api: &TokenStream) -> TokenStream {
        let ty = with_static_lifetimes(&self.ret);
        quote!(<#ty as #api::CrossReturn>::Raw)
    }

    fn slot_field(&self, api: &TokenStream) -> TokenStream {
        let (name, args, ret) = (&self.name, self.raw_args(api), self.raw_ret(api));
        quote! {
            #name: unsafe extern "C" fn(*const () #(, #args)*)
                -> #api::RResult<#ret, #api::ResourceError>
        }
    }

    fn shim_fn(&self, trait_name: &Ident, api: &TokenStream) -> TokenStream {
        let (name, raw_args, raw_ret) = (&self.name, self.raw_args(api), self.raw_ret(api));
        let names: Vec<_> = self.args.iter().map(|(n, _)| n).collect();
        let types: Vec<_> = self.args.iter().map(|(_, t)| with_static_lifetimes(t)).collect();
        let what = format!("{trait_name}::{name}");
        quote! {
            unsafe extern "C" fn #name(
                __data: *const () #(, #names: #raw_args)*
            ) -> #api::RResult<#raw_ret, #api::ResourceError> {
                #api::guard(#what, || {
                    let __this = unsafe { #api::instance::<T>(__data) };
                    #(let #names = unsafe { <#types as #api::Cross>::lift(#names) };)*
                    #api::CrossReturn::lower_return(T::#name(__this #(, #names)*))
                })
                .into()
            }
        }
    }

    fn desc(&self, api: &TokenStream) -> TokenStream {
        let (name, args, ret) = (self.name.to_string(), self.raw_args(api), self.raw_ret(api));
        let optional = self.optional;
        quote! {
            #api::MethodDesc {
                name: #api::RStr::from_str(#name),
                params: {
                    const PARAMS: &[&#api::TypeLayout] = &[#(#api::layout_of::<#args>()),*];
                    #api::RSlice::from_slice(PARAMS)
                },
                ret: #api::layout_of::<#ret>(),
                optional: #optional,
            }
        }
    }

    fn handle_method(
        &self,
        index: usize,
        trait_name: &Ident,
        vtable: &Ident,
        api: &TokenStream,
    ) -> TokenStream {
        let Self { name, ret, attrs, .. } = self;
        let names: Vec<_> = self.args.iter().map(|(n, _)| n).collect();
        let types: Vec<_> = self.args.iter().map(|(_, t)| t).collect();
        let fail = |e: TokenStream| match self.plain_return {
            true => quote!({ let _ = #e; return ::std::default::Default::default(); }),
            false => quote!(return ::std::result::Result::Err(#e)),
        };
        let poisoned = fail(quote!(e));
        let missing = if self.optional {
            let default_fn = self.default_fn(trait_name);
            quote! {
                if self.0.head().methods.len() <= #index {
                    return #default_fn(self #(, #names)*);
                }
            }
        } else {
            quote!()
        };
        quote! {
            #(#attrs)*
            #[inline]
            fn #name(&self #(, #names: #types)*) -> #ret {
                if let ::std::result::Result::Err(e) = self.0.check_fault() {
                    #poisoned
                }
                #missing
                // SAFETY: `open` checked that the vtable is this interface's and has this slot,
                // `new` made it so; the object is alive as long as we hold it.
                unsafe {
                    let vtable =
                        &*(self.0.head() as *const #api::VTableHead as *const #vtable);
                    let answer = (vtable.#name)(
                        self.0.data() #(, #api::erase(#api::Cross::lower(#names)))*
                    );
                    <#ret as #api::CrossReturn>::lift_return(self.0.note(answer))
                }
            }
        }
    }
}

/// Replaces every lifetime by `'static`: raw types have none, and this lets them be named outside
/// of a signature.
fn with_static_lifetimes(ty: &Type) -> Type {
    struct Static;
    impl VisitMut for Static {
        fn visit_lifetime_mut(&mut self, lifetime: &mut syn::Lifetime) {
            *lifetime = syn::Lifetime::new("'static", lifetime.span());
        }
        fn visit_type_reference_mut(&mut self, reference: &mut syn::TypeReference) {
            reference.lifetime = Some(syn::Lifetime::new("'static", Span::call_site()));
            syn::visit_mut::visit_type_reference_mut(self, reference);
        }
    }
    let mut ty = ty.clone();
    Static.visit_type_mut(&mut ty);
    ty
}

/// Renames `self` on the level of tokens, so that it also works inside macros such as `format!`.
fn rename_self(tokens: TokenStream) -> TokenStream {
    tokens
        .into_iter()
        .map(|token| match token {
            TokenTree::Ident(ident) if ident == "self" => {
                TokenTree::Ident(Ident::new("__this", ident.span()))
            }
            TokenTree::Group(group) => {
                let mut renamed =
                    proc_macro2::Group::new(group.delimiter(), rename_self(group.stream()));
                renamed.set_span(group.span());
                TokenTree::Group(renamed)
            }
            other => other,
        })
        .collect()
}
